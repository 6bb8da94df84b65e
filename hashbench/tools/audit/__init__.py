"""Every op of torch's own op database, and inputs that provoke races: what is documented against what is measured."""
