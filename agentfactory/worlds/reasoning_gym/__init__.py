"""Tasks of reasoning-gym: generated from a seed and verified by its verifiers, in processes of their own.

The package is not imported here: its verifiers evaluate parts of the model's answer, can hang, and print.
"""
