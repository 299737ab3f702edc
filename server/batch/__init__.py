"""`jaxpaged run-batch`: the requests of a file, answered into another one."""
