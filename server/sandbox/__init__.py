"""Processes that are ended when they exceed their time or memory."""
