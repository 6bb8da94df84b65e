"""What every sweep needs: run a model twice, find the first kernel that differs, prove the cause, write the row.

The core imports nothing else of hashbench. What extends it is listed in :mod:`hashbench.extensions`.
"""
