"""Figures and the HTML report; they read tables and draw, every number comes from Parquet."""
