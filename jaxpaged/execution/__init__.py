"""The compiled programs, the pools and the runner that dispatches steps to the device."""
