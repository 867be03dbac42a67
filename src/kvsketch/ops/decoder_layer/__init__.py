"""Three small pieces of a decoder layer that eager torch spreads over many launches: norm, rotary, gated SiLU.

They matter for single tokens only, where each launch costs as much as its work. Rounding follows the models' own
code: the norm is computed in fp32, rounded to the model's dtype, then multiplied by the weight.
"""
