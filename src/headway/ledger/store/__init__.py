"""The ledger's statements. Everything above this package is free of SQL and of the engine's name.

`contract.ItemStore` has the statements whose best form differs between the engines; ``sqlite`` and ``postgres``
implement it. The other modules hold the statements that both engines share, one module per table or group of tables.
"""
