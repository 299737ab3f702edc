"""The engine: start-up, the memory plan, the step loop, and the Python API around it."""
