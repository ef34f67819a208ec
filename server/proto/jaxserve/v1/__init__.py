"""Version 1 of the native protocol. Everything here but engine.proto is generated."""
