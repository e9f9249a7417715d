"""From telemetry to tables: pure functions of Parquet files, one module a question. Nothing here trains or draws."""
