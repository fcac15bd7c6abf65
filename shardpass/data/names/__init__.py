"""Names: the ids that nodes have in the user's own data, strings or any integers, beside the numbers of the engine.

The name of node i is entry i of the `Names`. A `Dictionary`, a table of DuckDB, finds the number of each name. This
room knows columns and files of rows. It knows neither graphs nor stores.
"""

from shardpass.data.names.column import IdColumn, column_of, column_of_names, name_type, write_names
from shardpass.data.names.dictionary import Dictionary, distinct_names, find_names, open_dictionary
from shardpass.data.names.names import Examples, Names

__all__ = [
    "Dictionary",
    "Examples",
    "IdColumn",
    "Names",
    "column_of",
    "column_of_names",
    "distinct_names",
    "find_names",
    "name_type",
    "open_dictionary",
    "write_names",
]
