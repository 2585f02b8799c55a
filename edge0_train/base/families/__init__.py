"""The name tables, one module a family; `edge0_train.base.names` finds them."""
