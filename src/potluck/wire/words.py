"""The words of the codes that guests type: 512, each at most 7 letters and two changes away from every other one.

So the guest detects one wrong letter before it costs a try.
"""

_TEXT = """
acorn agate album alder algae almond alpaca amber anchor antler apple apron arbor arrow aspen aster atlas
attic autumn badger bagel bakery bamboo banana banjo barge barley barn barrel basalt basil basket bazaar
beacon beagle beaver beetle bell berry birch bison bobcat bonsai bottle branch bread brick bridge broom brush
bubble bucket bugle burrow butter button cabin cactus camel camera canary candle canoe canvas canyon cargo
carpet carrot cashew castle cavern cedar celery cello chalk chapel cherry chisel cider citrus clay cliff clock
cloud clover cobalt cobra coffee collie comet condor copper coral cork cotton cougar coyote crane crater
crayon creek crocus crow cumin curry cypress dahlia daisy dancer desert diamond dingo dolphin donkey dragon
drum dune easel eclipse elbow elm emerald engine ermine fabric falcon feather fennel fern ferret fiddle fig
finch fjord flannel flint flute forest fossil fox freckle fresco frog fudge gadget galaxy gallery garlic
garnet gazebo gazelle gecko geyser ginger giraffe glacier glove goblet gondola goose gopher granite granola
grape gravel gravy grouse guava guitar gull hamlet hammer hammock hamster harmony harp harvest hazel hedge
helmet hermit heron hickory hippo hollow honey hornet hummus igloo iguana indigo inkwell iris island ivory ivy
jackal jaguar jasmine javelin jelly jersey jigsaw jukebox jungle juniper kale kayak kelp kernel kettle kimono
kiosk kitchen kiwi koala ladder ladle lagoon lantern lark lasso lattice laurel lava lemon lentil leopard
lettuce library lichen lilac lime linen lizard llama lobby lobster locket locust lotus lozenge lumber lynx
lyric magnet magpie mallet mammoth mango maple marble margin market marmot marsh meadow melon mercury meteor
midday mimosa mineral minnow mirror mitten mocha monocle monsoon mosaic moss muffin mural mustard myrtle
nebula nectar needle newt nickel nomad noodle nougat nugget nutmeg oasis oatmeal obelisk oboe ocean ocelot
octopus olive omelet onion opal orange orbit orchard orchid oregano oriole osprey ostrich otter ottoman oven
owl oyster paddle paella pagoda palace pancake panda pansy papaya paprika parade parcel parsley parsnip pasta
pastry peach peacock peanut pear pebble pecan pelican pencil penguin peony pepper pewter piano pickle pigeon
pilgrim pillow pine pirate planet plateau plaza plum polenta pollen pond poplar poppy potato prairie pretzel
prism pudding puma pumpkin pyramid python quail quarry quartz quilt quince quiver rabbit raccoon radar radish
rafter rainbow raisin rapids raven ravine reef regatta relish rhubarb ribbon rice ripple risotto river robin
rooster ruby runway sable saffron sage salad salmon salsa sandal sardine satchel saucer sawdust scallop scarf
sequoia sesame shark shelter sherbet shovel silver skillet sloth snail snow sofa sonnet sorbet sorrel sparrow
spider spinach spiral sponge spruce squid statue stereo stork stove stream strudel sugar sultana sundial
sunset swallow swan syrup tablet taco talon tamarin tapioca teacup teapot temple tennis terrace thicket
thimble thistle thunder thyme tiger timber toast tofu tomato topaz torch toucan tractor trellis tripod trout
truffle trumpet tuba tugboat tulip tundra tunnel turban turkey turnip turtle tuxedo unicorn urchin valley
vanilla velvet venison viaduct vinegar violet violin vortex vulture waffle wagon wallaby walnut walrus warbler
wasabi whale wheat wicker window wombat wrench yacht yak yogurt yonder zebra zenith zephyr zigzag zinc zodiac
"""
WORDS = tuple(_TEXT.split())
