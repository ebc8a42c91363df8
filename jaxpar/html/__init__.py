"""Building blocks of HTML pages: escaped markup and the page around it, line charts and cards of shards."""
