"""Rendering: reports as text. Nothing here computes, nothing here knows options."""
