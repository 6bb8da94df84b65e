"""What TorchInductor made of a program: its graphs, the generated modules and their kernels. ``internals`` alone uses
what torch does not document."""
