"""What a run writes down: Arrow schemas, the part-file writer, and the sensors."""
