"""Where results live: Parquet is the truth; DuckDB and MLflow are views of it, made anew at any time."""
