"""Sequence chunks: a captured program as one program for each slice of its sequence.

Chunk j of c runs on its own slice of every activation. It is legal because of what is proven of the program: a later
token matters nowhere but where a causal mask hides it. Where keys and values of earlier tokens are read, chunk j reads
those of chunks 0 to j; sums over tokens become sums over chunks.
"""
