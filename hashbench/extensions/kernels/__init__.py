"""A kernel and its reference: is the difference rounding, or is the kernel wrong?"""
