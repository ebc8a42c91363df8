"""Pages of HTML: pieces that are escaped, bars, lines, and the frame around them."""
