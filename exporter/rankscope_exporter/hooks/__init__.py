"""
Where Rankscope looks into a model runner: which methods (`targets`), with what around them (`wrappers`), put there and taken away (`install`).
"""
