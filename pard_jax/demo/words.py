"""The words of the demo's prompts, in lists that the patterns of :mod:`pard_jax.demo.patterns` name.

Every list fits every place where a pattern names it, so that each combination is a sentence, and one fit for children.
"""

from __future__ import annotations


def _split(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(separator) if item.strip())


WORDS: dict[str, tuple[str, ...]] = {
    # Stories.
    "trait": _split(
        """brave, shy, kind, curious, clever, sleepy, lonely, cheerful, gentle, playful, hungry, tiny, old, young,
        funny, honest, patient, proud, grumpy, careful, friendly, lazy, quiet, noisy, lucky, clumsy, wise, happy,
        sad, eager, helpful, stubborn, dreamy, excited, polite, forgetful, generous, worried, little, small"""
    ),
    "hero": _split(
        """fox, owl, rabbit, bear, mouse, squirrel, hedgehog, elephant, turtle, frog, duck, kitten, puppy, pony,
        lamb, lion, tiger, monkey, penguin, otter, beaver, deer, raccoon, koala, panda, giraffe, zebra, whale,
        dolphin, octopus, crab, snail, ant, bee, butterfly, ladybug, spider, crow, sparrow, parrot, dragon,
        robot, unicorn, snowman, girl, boy, farmer, baker, king, queen, prince, princess, sailor, gardener,
        wizard, painter, cloud, star, teapot, train, boat, tree, scarecrow, goat, donkey, swan, bat, goose, seal,
        kangaroo"""
    ),
    "name": _split(
        """Pip, Lily, Max, Rosie, Oliver, Daisy, Toby, Mia, Sam, Ruby, Leo, Hazel, Finn, Willow, Jack, Poppy, Benny,
        Clara, Hugo, Nora, Milo, Ella, Oscar, Luna, Teddy, Anna, Charlie, Molly, Felix, Ivy"""
    ),
    "friend": _split(
        """a lost chick, an old tortoise, a tired mole, a baby bird, a little cat, a friendly ghost, a small dog,
        an injured pigeon, a silly goose, a quiet moth, a wise old toad, a lonely giant, a baby whale,
        a tiny fairy, a busy postman, a kind grandmother, a cold hamster, a sad clown, a new neighbor,
        an old fisherman, a hungry piglet, a shy firefly, a lost sheep, a little cousin, a sleepy badger"""
    ),
    "object": _split(
        """a golden key, a red balloon, a magic lamp, a shiny stone, an old map, a silver bell, a blue feather,
        a tiny door, a wooden box, a lost hat, a glowing mushroom, a big pumpkin, an empty nest, a warm scarf,
        a music box, a paper boat, a yellow umbrella, a strange egg, a broken kite, a green button,
        a letter in a bottle, a basket of apples, a toy drum, a pair of tiny shoes, a colorful shell,
        a secret note, an old book, a jar of honey, a bright lantern, a wishing coin, a soft blanket,
        a bag of seeds"""
    ),
    "place": _split(
        """in the forest, in the garden, by the river, on the beach, in a cave, on a high hill, in the attic,
        at the farm, in a small village, under an old bridge, in the snow, near a quiet pond, in a busy town,
        at the market, on a small island, in the school yard, in a castle, at the edge of the sea,
        in a tall tree, in the desert, behind the barn, at the train station, in the library,
        in a field of flowers, in the jungle, in the kitchen, on a mountain, in a toy shop, at the park,
        in an apple orchard"""
    ),
    "wish": _split(
        """learn to swim, fly to the moon, bake a cake, see the ocean, make a new friend, win a race, sing a song,
        build a house, paint a picture, grow a garden, find the way home, ride a bike, learn to read,
        dance in the rain, touch a rainbow, climb the tallest tree, plan a surprise party, catch a falling star,
        sail around the world, play the drums, help the whole village, sleep all winter, cook a warm soup,
        write a letter, meet the queen, stay up all night, fix a broken toy, learn to share, count the stars,
        visit grandmother"""
    ),
    "fear": _split(
        """the dark, thunder, deep water, high places, loud noises, the first day of school, big dogs, being alone,
        the wind, trying new things, speaking to strangers, bad dreams, shadows, the old house, making mistakes"""
    ),
    "trouble": _split(
        """gets lost in the fog, breaks a favorite cup, misses the last bus, spills all the paint,
        forgets a birthday, tells a small lie, falls into a muddy puddle, loses a race, wakes up too late,
        drops a letter in the water, eats too many berries, hears a strange noise at night, takes the wrong path,
        has a quarrel with a good friend, cannot fall asleep, is too small to reach the shelf,
        gets stuck in the rain, finds that the bridge is gone"""
    ),
    "moral": _split(
        """it is good to share, friends help each other, being honest matters, small acts of kindness count,
        it is fine to ask for help, practice makes us better, everyone is special, patience pays off,
        it is brave to say sorry, working together is easier, listening is important, mistakes help us learn,
        home is a special place, we should never give up, being different is good, we should take care of nature"""
    ),
    "time": _split(
        """One sunny morning, One rainy day, One cold night, Early one spring, On a quiet evening,
        One windy afternoon, On the first day of summer, Late one autumn day, On a snowy morning,
        Once upon a time, Long ago, One day""",
    ),
    # Questions: living things. Plurals, so that no article is needed.
    "animals": _split(
        """cats, dogs, cows, horses, pigs, sheep, chickens, ducks, goats, rabbits, mice, squirrels, foxes, wolves,
        bears, lions, tigers, elephants, giraffes, zebras, monkeys, kangaroos, koalas, pandas, penguins, owls,
        eagles, parrots, frogs, snakes, turtles, crocodiles, sharks, whales, dolphins, octopuses, crabs, bees,
        ants, butterflies, spiders, snails, bats, camels, deer, hedgehogs"""
    ),
    "other_animals": _split(
        """goldfish, hamsters, lizards, seals, otters, moles, crows, swans, moths, beetles, worms, cheetahs, hippos,
        rhinos, donkeys, geese, beavers, gorillas, polar bears, ostriches"""
    ),
    "pets": _split("a cat, a dog, a rabbit, a hamster, a goldfish, a parrot, a guinea pig, a turtle, a pony, a canary"),
    "plants": _split(
        """trees, flowers, grass, roses, sunflowers, tomatoes, carrots, potatoes, strawberries, beans, mushrooms,
        cactuses, herbs, apple trees, pumpkins, tulips, onions, corn, oak trees, ferns"""
    ),
    # Questions: food.
    "fruits": _split(
        """apples, bananas, oranges, grapes, lemons, cherries, pears, peaches, plums, strawberries, blueberries,
        melons, pineapples, mangoes, carrots, tomatoes, potatoes, onions, cucumbers, peas, beans, pumpkins,
        mushrooms, eggs"""
    ),
    "dish": _split(
        """a cheese sandwich, a fruit salad, vegetable soup, pancakes, scrambled eggs, a cup of tea, hot chocolate,
        lemonade, popcorn, mashed potatoes, rice, toast, a simple salad, apple pie, oatmeal,
        pasta with tomato sauce, pizza, chocolate cookies, a smoothie, bread, banana bread, an omelet,
        a baked potato, chicken soup, jam"""
    ),
    "meal": _split("breakfast, lunch, dinner, a picnic, a birthday party, a snack after school, a rainy day meal"),
    # Questions: weather, time and nature.
    "weather": _split(
        """rain, snow, fog, hail, thunder, lightning, wind, a rainbow, a storm, frost, a cloud, a tornado, ice, dew,
        sunshine, a drought, a flood, a breeze"""
    ),
    "conditions": _split("rainy, snowy, sunny, windy, cold, hot, foggy, stormy, cloudy, icy, warm, cool"),
    "season": _split("spring, summer, autumn, winter"),
    "concept": _split(
        """gravity, a volcano, an earthquake, the moon, the sun, a star, a planet, a river, a lake, an island,
        a mountain, a desert, a rainforest, the ocean, electricity, a magnet, a shadow, an echo, sound, light,
        heat, energy, recycling, time, money, a map, a calendar, a law, a city, a farm, a museum, a library,
        the internet, a computer, a robot, a rocket, a bridge, a battery, steam, oxygen, the air, soil, a seed,
        a fossil, a dinosaur, a habitat, photosynthesis, evaporation, pollution, friendship, kindness, courage,
        respect, trust, teamwork, honesty, a promise, a secret, a dream, imagination, music, art, a poem,
        a story, a holiday, a tradition"""
    ),
    "fact": _split(
        """the sky is blue, leaves change color in autumn, the sea is salty, ice floats on water,
        the moon changes shape, birds fly south in winter, we need sleep, we need to drink water,
        plants need sunlight, cats purr, dogs wag their tails, bees make honey, the sun sets, we have seasons,
        metal feels cold, soap cleans hands, bread rises, apples turn brown, onions make us cry, we yawn,
        we sneeze, we laugh, stars twinkle, we see lightning before thunder, snow is white, balloons float,
        boats float, tires are round, wood burns, puddles dry up, cows chew for so long, owls hunt at night,
        flowers smell nice, people wear glasses, teeth fall out, our hair grows, we get hungry, we get tired,
        we sweat, rivers flow to the sea, bridges are strong, clocks have hands, people keep pets,
        people celebrate birthdays"""
    ),
    # Questions: home, school, jobs.
    "thing": _split(
        """spoon, towel, broom, clock, mirror, lamp, pillow, ladder, bucket, umbrella, candle, hammer, bicycle,
        pencil, eraser, ruler, backpack, notebook, toothbrush, comb, kettle, pan, knife, oven, fridge,
        washing machine, vacuum cleaner, telephone, camera, radio, fan, heater, sponge, basket, blanket, key,
        lock, paintbrush, flashlight, helmet, raincoat, thermometer, teapot, water bottle, lunch box, iron,
        carpet, curtain, window, chair"""
    ),
    "machine": _split(
        """bicycle, clock, kettle, fridge, oven, washing machine, vacuum cleaner, telephone, camera, radio,
        flashlight, thermometer, car, airplane, train, elevator, boat, submarine, helicopter, windmill,
        lighthouse, printer, zipper, microscope, telescope, traffic light, toaster, umbrella, pencil, candle"""
    ),
    "room": _split(
        "kitchen, bedroom, bathroom, living room, garage, garden, classroom, attic, closet, desk, backpack, car"
    ),
    "job": _split(
        """doctor, nurse, teacher, farmer, baker, firefighter, police officer, pilot, sailor, carpenter, painter,
        gardener, cook, waiter, dentist, vet, librarian, postal worker, bus driver, engineer, scientist,
        astronaut, musician, writer, actor, judge, tailor, plumber, electrician, fisherman, photographer,
        architect, zookeeper, mechanic, shopkeeper"""
    ),
    "site": _split(
        """farm, zoo, library, hospital, school, bakery, museum, park, forest, beach, market, airport,
        train station, harbor, garden, circus, bank, post office, toy store, restaurant, swimming pool,
        playground, castle, pond"""
    ),
    "subject": _split(
        """reading, writing, math, science, history, geography, music, art, sports, spelling, a new language,
        drawing, singing, public speaking, handwriting"""
    ),
    # Questions: body, feelings, everyday life.
    "organ": _split(
        "heart, brain, stomach, skin, nose, tongue, skeleton, liver, mouth, spine, ear, eye, hand, thumb, knee"
    ),
    "body": _split(
        "teeth, bones, muscles, lungs, eyes, ears, eyelashes, nails, fingers, toes, hair, ribs, eyebrows, elbows"
    ),
    "feeling": _split(
        """sad, angry, lonely, nervous, tired, bored, worried, jealous, shy, afraid, embarrassed, excited, proud,
        homesick, disappointed, confused, stressed, grateful, happy, left out"""
    ),
    "skill": _split(
        """swim, ride a bike, draw a cat, tie my shoes, cook rice, play chess, whistle, read faster, juggle, dance,
        play the piano, plant a seed, fold a paper plane, sew a button, take good photos, bake bread,
        write a poem, make a paper boat, build a kite, tell a good joke, skate, knit, play the guitar,
        throw a ball, make a snowman"""
    ),
    "doing": _split(
        """reading books, walking in the woods, swimming, gardening, cooking, painting, playing chess,
        riding a bike, running, dancing, singing, fishing, camping, hiking, drawing, knitting, watching birds,
        collecting stamps, baking, playing football, taking photos, stargazing, doing puzzles, playing the piano,
        skating, playing with a dog, building models, writing stories, listening to music, keeping a diary"""
    ),
    "habit": _split(
        """brush our teeth, wash our hands, eat vegetables, go to bed early, drink water, say thank you,
        recycle paper, save water, turn off the lights, wear a helmet, look both ways before crossing the street,
        share our toys, clean our room, do homework, eat breakfast, exercise, wear a seat belt,
        be kind to animals, read every day, save money, help our neighbors, listen to others, plant trees,
        tell the truth, use sunscreen, say sorry, keep promises, take a break, be on time, be polite"""
    ),
    "person": _split(
        """my mother, my father, my grandmother, my grandfather, my sister, my brother, my teacher, my best friend,
        my aunt, my uncle, my neighbor, my cousin, my classmate, my coach, my doctor, my boss, my piano teacher,
        my bus driver"""
    ),
    "gift": _split(
        """a book, a warm sweater, a bunch of flowers, a box of chocolates, a toy train, a nice dinner,
        a birthday cake, help with homework, a new bike, a pair of gloves, a plant, a puzzle,
        a lovely day at the zoo, a painting, a scarf, a ride to school, good advice, a board game, fresh bread,
        a postcard, a ball, some homemade jam, a new hat"""
    ),
    "news": _split(
        """will be late, cannot come to the party, am feeling better, lost a book, passed a test,
        moved to a new house, got a puppy, found the missing keys, need help with homework, am going on a trip,
        broke a cup by accident, want to visit on Sunday, learned to swim, planted a tree, made a cake,
        started a new hobby, miss our talks"""
    ),
    "problem": _split(
        """I cannot sleep, I lost my keys, I spilled juice on the carpet, I forgot my homework, my shoes are wet,
        my friend is angry with me, I am late for school, my plant looks dry, my room is messy, I have a cold,
        I am thirsty, my bike has a flat tire, I broke a glass, my phone battery is low, I burned the toast,
        I have nothing to do, I cannot find my cat, I have a small cut, my soup is too salty,
        my brother will not share, it is too noisy, I have too much homework, my hands are cold,
        I missed the bus, I got a bad grade, I want to save money, I am new at school, my dog barks a lot,
        my shirt has a stain, I keep forgetting things"""
    ),
    # Questions: words, colors, comparisons.
    "color": _split("red, blue, green, yellow, orange, purple, pink, brown, black, white, gray, gold"),
    "paint": _split("red and yellow, blue and yellow, red and blue, red and white, black and white, green and white"),
    "shape": _split(
        "round, square, soft, hard, heavy, light, sharp, smooth, sticky, cold, hot, shiny, wet, noisy, fast, slow"
    ),
    "adjective": _split(
        """happy, big, fast, hot, light, old, loud, early, easy, strong, clean, full, high, wide, soft, brave, rich,
        kind, open, near, sweet, dry, smooth, bright, polite, careful, noisy, lazy, thick, sharp, calm, safe,
        tall, heavy, empty"""
    ),
    "word": _split(
        """brave, curious, gentle, ancient, journey, harvest, whisper, treasure, generous, enormous, fragile,
        delicious, patient, clever, peaceful, mysterious, cheerful, ordinary, invisible, adventure, promise,
        shelter, wander, gather, discover, imagine, protect, borrow, celebrate, neighbor, lantern, meadow, giant,
        grateful, honest, puzzle, stubborn"""
    ),
    "pair": _split(
        """a frog and a toad; a lake and a river; the sun and the moon; butter and cheese; a fruit and a vegetable;
        a city and a village; a crocodile and an alligator; a hill and a mountain; tea and coffee; rain and snow;
        a planet and a star; a bee and a wasp; a rabbit and a hare; a road and a path; a cup and a glass;
        day and night; a boat and a ship; a chair and a sofa; summer and winter; a jacket and a coat;
        a pen and a pencil; a book and a magazine; a bus and a train; a sea and a lake; a plant and an animal;
        salt and sugar; gold and silver; a doctor and a nurse; a guitar and a violin; a lie and a joke;
        a friend and a neighbor; a zoo and a farm; a turtle and a tortoise; an insect and a spider;
        a moth and a butterfly; a storm and a breeze; milk and cream; a house and an apartment;
        a want and a need; hearing and listening; a bird and a bat; a whale and a fish""",
        ";",
    ),
    "group": _split(
        """farm animals; wild animals; birds; fish; insects; fruits; vegetables; flowers; trees; colors; shapes;
        sports; musical instruments; tools; vehicles; jobs; planets; oceans; rooms in a house; kinds of weather;
        clothes; toys; drinks; desserts; feelings; school supplies; board games; hobbies; things that fly;
        things that are cold; things made of wood; things made of glass; things found in a kitchen;
        things found at the beach; sea animals; pets; good habits; ways to be kind; ways to save water;
        healthy snacks; things with wheels; winter clothes; sounds heard at night; animals with stripes;
        animals that sleep in winter; foods made from milk; kitchen tools""",
        ";",
    ),
}
