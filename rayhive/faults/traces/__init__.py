"""Cloud availability traces: their formats, their reading, and the traces of the library."""
