"""Other routers' rules, one file each, so that ours is measured against them on the same fleet and the same requests.

Each is written from its source's public description, with its source's defaults. What holds for all:

- Text is seen in the router's blocks (256 tokens or more): matches are rounded down to them, whatever the source's
  own unit is. Sizes that the source gives in characters are divided by four.
- They decide at once and hold nothing back. Load in flight is counted at the decision.
- A map of what was sent is not told that an instance has lost its cache, nor that an answer is whole.
- Ties are broken at random, except where the source is known to do otherwise.
"""
