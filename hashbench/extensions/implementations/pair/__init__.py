"""Do two implementations compute the same function, and where do they part?"""
