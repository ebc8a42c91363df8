"""Building blocks of HTML pages: escaped markup, bars, line charts, and the frame around them."""
