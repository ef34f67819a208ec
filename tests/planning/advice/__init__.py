"""Advice: what is measured, what is found in it, and what is said."""
