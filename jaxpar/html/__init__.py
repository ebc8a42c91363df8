"""Pages of HTML: pieces that are escaped, bars, and the frame around them."""
