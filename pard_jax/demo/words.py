"""The words and sentence patterns of the demo's prompts; :mod:`pard_jax.demo.prompts` puts them together.

A pattern names lists of :data:`WORDS` in braces; ``a(n)`` becomes "a" or "an" by the word that follows. Every list
fits every place where a pattern names it, so that each combination is a sentence, and one fit for children.
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

STORY_HEROES = (
    "a(n) {trait} {hero}",
    "a(n) {trait} {hero} named {name}",
    "a(n) {hero} named {name}",
)
STORY_EVENTS = (
    "who finds {object} {place}",
    "who loses {object} {place}",
    "who hides {object} {place}",
    "who shares {object} with {friend}",
    "who meets {friend} {place}",
    "who helps {friend} {place}",
    "who gives {object} to {friend}",
    "who wants to {wish}",
    "who wants to {wish} with {friend}",
    "who finds {object} and wants to {wish}",
    "who is afraid of {fear} and meets {friend}",
    "who is afraid of {fear} but finds {object}",
    "who {trouble} and meets {friend}",
    "who {trouble} and finds {object}",
    "who spends a day {place} with {friend}",
    "who looks for {object} {place}",
)
# {} is "HERO who EVENT". Small models heed a number of sentences far better than "short" or "a few words": mostly the
# last three get answers of several paragraphs.
STORY_REQUESTS = (
    "Write two sentences about {}.",
    "Write three sentences about {}.",
    "Write four sentences about {}.",
    "Write a few sentences about {}.",
    "Write three simple sentences about {}.",
    "Write a few simple sentences about {}.",
    "Write two happy sentences about {}.",
    "Write three funny sentences about {}.",
    "Write two sentences of a bedtime story about {}.",
    "Write three sentences of a bedtime story about {}.",
    "Write two sentences of a children's story about {}.",
    "Write three simple sentences that tell a story about {}.",
    "Write four sentences that tell a story about {}.",
    "Write the first two sentences of a story about {}.",
    "Tell the story of {} in two sentences.",
    "In one short paragraph, tell the story of {}.",
    "Write a short story about {}.",
    "Tell me a short bedtime story about {}.",
)
# The same closer more than once comes more often.
STORY_CLOSERS = ("", "", "", "", "Use simple words.", "Give it a happy ending.", "Show that {moral}.")
STORY_STARTS = (
    'Write the next two sentences of this story: "{time}, a(n) {trait} {hero} found {object} {place}."',
    'Write three more sentences for this story: "{time}, a(n) {trait} {hero} met {friend} {place}."',
    'Finish this story in two sentences: "{time}, {name} the {hero} lost {object} {place}."',
    'What happens next? Answer in a few sentences. "{time}, {name} the {hero} met {friend}."',
    'Write two sentences that begin with "{time}, a(n) {trait} {hero} wanted to {wish}."',
)

QUESTIONS = (
    "What do {animals} eat?",
    "Where do {animals} live?",
    "How do {animals} sleep?",
    "How do {animals} move?",
    "What do {animals} look like?",
    "How do {animals} take care of their babies?",
    "How do {animals} stay safe?",
    "Why are {animals} special?",
    "Tell me about {animals}.",
    "Give me one fun fact about {animals}.",
    "Describe {animals} to a child.",
    "What do {animals} do all day?",
    "What do {animals} do in {season}?",
    "How are {animals} different from {other_animals}?",
    "What do {animals} and {other_animals} have in common?",
    "Tell me about {other_animals}.",
    "How do I take care of {pets}?",
    "What should I know before I get {pets}?",
    "Why do people like to have {pets} at home?",
    "What do {plants} need to grow?",
    "How do I take care of {plants}?",
    "What are {plants}?",
    "What happens to {plants} in {season}?",
    "What do {fruits} taste like?",
    "Are {fruits} good for you?",
    "What can I cook with {fruits}?",
    "Where do {fruits} come from?",
    "How should I store {fruits}?",
    "Are {fruits} a good choice for {meal}?",
    "What can I make with {fruits} for {meal}?",
    "How do I make {dish}?",
    "What goes well with {dish}?",
    "Is {dish} a good idea for {meal}?",
    "What do I need to make {dish}?",
    "What is a good idea for {meal} in {season}?",
    "What is {weather}?",
    "How can I stay safe in bad weather, such as {weather}?",
    "Describe {weather} to someone who has never seen it.",
    "What should I wear on a(n) {conditions} day?",
    "What can children do on a(n) {conditions} day?",
    "What do {animals} do on a(n) {conditions} day?",
    "Describe a(n) {conditions} day at a(n) {site}.",
    "What happens in {season}?",
    "What can I do in {season} if I like {doing}?",
    "What is {concept}?",
    "Explain {concept} to a child.",
    "Why is {concept} important to people?",
    "Tell me one interesting thing about {concept}.",
    "Why is it that {fact}?",
    "Explain to a child why {fact}.",
    "My little brother asks why {fact}. What should I say?",
    "What is a(n) {thing} used for?",
    "How do I choose a good {thing}?",
    "How do I clean a(n) {thing}?",
    "Describe a(n) {thing} without using its name.",
    "Does a(n) {job} need a(n) {thing}?",
    "How does a(n) {machine} work?",
    "Why was the {machine} a good invention?",
    "How do I keep my {room} tidy?",
    "What do people keep in a(n) {room}?",
    "What does a(n) {job} do?",
    "How do I become a(n) {job}?",
    "Why do we need a(n) {job}?",
    "What does a(n) {job} do at a(n) {site}?",
    "What tools does a(n) {job} use?",
    "Describe a day in the life of a(n) {job}.",
    "What can you see at a(n) {site}?",
    "What should I take with me to a(n) {site}?",
    "What should I take with me to a(n) {site} on a(n) {conditions} day?",
    "How should children behave at a(n) {site}?",
    "Why is {subject} important?",
    "How can I get better at {subject}?",
    "How can I make {subject} fun?",
    "How can I help {person} with {subject}?",
    "What does the {organ} do?",
    "Why is the {organ} important?",
    "Why do we have {body}?",
    "How do I take care of my {body}?",
    "What should I do when I feel {feeling}?",
    "Why do people feel {feeling}?",
    "How can I help a friend who feels {feeling}?",
    "What can I say to {person} when I feel {feeling}?",
    "How do I learn to {skill}?",
    "Give me one good tip: how do I {skill}?",
    "How can I teach {person} to {skill}?",
    "Why is {doing} good for you?",
    "Give me three tips for {doing}.",
    "What do I need for {doing}?",
    "How can I start {doing} in {season}?",
    "What is more fun for children, {doing} or watching television?",
    "Why should we {habit}?",
    "How can children learn that we should {habit}?",
    "What happens if we do not {habit}?",
    "What is a good gift for {person}?",
    "What is a good gift for {person}, who likes {doing}?",
    "Write a short thank-you note to {person} for {gift}.",
    "Write a short message to {person} to say that I {news}.",
    "Write a birthday wish for {person}.",
    "Write a birthday wish for {person}, who likes {doing}.",
    "What should I do if {problem}?",
    "Help me, {problem}. What now?",
    "How can I ask {person} for help when {problem}?",
    "Name three things that are {color}.",
    "What does the color {color} make you think of?",
    "Name something {color} that you can see at a(n) {site}.",
    "What color do you get when you mix {paint}?",
    "Name three things that are {shape}.",
    "Name something that is {color} and {shape}.",
    "What is the opposite of {adjective}?",
    "Use the word {adjective} in a sentence about {animals}.",
    'What does the word "{word}" mean?',
    'Write a sentence with the word "{word}".',
    'Explain the word "{word}" to a child with an example.',
    "What is the difference between {pair}?",
    "Compare {pair}.",
    "Explain to a child how to tell {pair} apart.",
    "Name three {group}.",
    "Can you list five {group}?",
    "Which {group} do children like, and why?",
)
# As above, repeated for their weight.
QUESTION_OPENERS = ("", "", "", "", "", "", "Hello! ", "Hi there. ", "I have a question. ")
QUESTION_CLOSERS = (
    "",
    "Answer in a few sentences.",
    "Answer in a few sentences.",
    "Answer in one short paragraph.",
    "Answer in two sentences.",
    "Answer in two or three sentences.",
    "Use two or three sentences.",
    "Use only one or two sentences.",
    "One short paragraph is enough.",
    "Please use simple words and answer in a few sentences.",
)
