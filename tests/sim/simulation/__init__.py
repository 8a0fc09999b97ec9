"""Many nodes of the real code on one store, under a virtual clock and one seed, with everything going wrong that may go wrong.

loop    an event loop whose time jumps to the next thing that happens
wire    a node's connection to the store: slow, lost, late, repeated; and the node itself, which may stop or die at any request
truth   watches every write as it takes effect, and knows what must hold at that instant
history what was asked, what was answered, and whether that can be true
actors  what users and collectors do
world   puts it together: one seed, one run
mutants the real code with one rule broken: each has to be caught
"""
