"""When parameters are gathered, waited for, released and their gradients reduced: pure Python, no torch."""
