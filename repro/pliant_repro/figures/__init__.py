"""The figures of the papers and the demo: a module for each, which runs it, judges it and draws it; and the report on all of them."""
