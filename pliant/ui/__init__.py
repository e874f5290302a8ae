"""Jobs as they run, from their records: stories as pure values, the page in the browser, and the same for a terminal."""
