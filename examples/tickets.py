"Make support tickets from a seed, as SFT rows: a message in, one JSON object with team, priority and summary out"
import argparse
import json
import random
from pathlib import Path

SYSTEM = 'You triage support tickets. Answer with one JSON object with the keys team, priority and summary.'
TICKETS = [ # team, what happened, summary; {n} is a number of its own for each ticket
    ('billing', 'I was charged twice for order {n}', 'double charge for order {n}'),
    ('billing', 'Invoice {n} shows another amount than my card statement', 'amount of invoice {n} differs from statement'),
    ('billing', 'The refund for order {n} has not arrived', 'missing refund for order {n}'),
    ('delivery', 'Parcel {n} was due three days ago and is not here', 'parcel {n} is late'),
    ('delivery', 'Parcel {n} came with a broken {item}', '{item} in parcel {n} is broken'),
    ('delivery', 'I got somebody else\'s {item} instead of order {n}', 'wrong item for order {n}'),
    ('technical', 'The app closes when I open ticket {n}', 'app crash on ticket {n}'),
    ('technical', 'Your page shows error {n} when I pay for a {item}', 'error {n} at payment'),
    ('technical', 'The tracking page of parcel {n} stays empty', 'tracking of parcel {n} is empty'),
    ('account', 'I cannot log in as customer {n} since I changed my phone', 'login of customer {n} fails'),
    ('account', 'Please change the address of customer {n}', 'new address for customer {n}'),
    ('account', 'Please close the account of customer {n}', 'close account {n}'),
]
ITEMS = ['lamp', 'kettle', 'chair', 'radio', 'bicycle bell', 'clock', 'tent', 'printer']
URGENCY = [('high', ['This is urgent, I leave tomorrow.', 'I need an answer today.', 'My customers are waiting because of this!']),
           ('normal', ['Please have a look.', 'What can you do about it?', 'I would like to know what happens next.']),
           ('low', ['There is no hurry.', 'Whenever you find the time.', 'It is not important, I only wanted to say so.'])]
GREETINGS = ['', 'Hello, ', 'Good morning. ', 'Hi there, ', 'Dear team, ']
ASIDES = ['I have been a customer for many years and was always content.', 'My neighbour ordered the same thing and had no trouble at all.', 'I tried it again this morning, and nothing changed.',
          'I have also written to you on the form of your page, but nobody answered.', 'The person on the phone was friendly and could not help me.', 'I have looked through all the questions on your help pages and found nothing like it.',
          'Perhaps it has to do with the holidays, when everything takes longer.', 'I can send you pictures of everything if that helps.', 'Before that, everything went as it should, from the first order to the last one.']


def ticket(number, rng):
    "One row; one in thirty is a long story of well over 320 tokens"
    team, said, summary = rng.choice(TICKETS)
    priority, endings = rng.choice(URGENCY)
    words = {'n': number, 'item': rng.choice(ITEMS)}
    asides = rng.choices(ASIDES, k=30) if rng.random() < 1 / 30 else rng.sample(ASIDES, rng.choice([0, 0, 0, 1, 1, 2]))
    text = ' '.join([rng.choice(GREETINGS) + said.format(**words) + '.', *asides, rng.choice(endings)])
    answer = json.dumps({'team': team, 'priority': priority, 'summary': summary.format(**words)})
    return {'messages': [{'role': 'system', 'content': SYSTEM}, {'role': 'user', 'content': text}, {'role': 'assistant', 'content': answer}]}


def tickets(rows, seed):
    "`rows` tickets, all different"
    rng = random.Random(seed)
    return [ticket(number, rng) for number in rng.sample(range(1000, 100_000), rows)]


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rows', type=int, default=1000)
    parser.add_argument('--seed', type=int, default=11)
    parser.add_argument('--out', default='data/tickets.jsonl')
    args = parser.parse_args()
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(map(json.dumps, tickets(args.rows, args.seed))) + '\n')
    print(f'{args.rows} tickets in {path}')
