"""Flight records: what each rank did last, readable after its process was killed."""
