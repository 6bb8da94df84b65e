"""Two implementations of one model: do both hold the same weights, whatever they are called? (``docs/weights.md``)"""
