"""Clients that others wrote, unmodified. `openai` has its tests beside the HTTP door's."""
