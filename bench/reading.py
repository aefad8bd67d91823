"How fast a large trace is read: 100,000 rows of 600 bytes, parsing alone and with token lengths, a bad row among them, memory per row"
import argparse
import json
import random
import resource
import tempfile
import time
from incremental_train.chat import ChatTokenizer
from incremental_train.encode import encode
from incremental_train.model import find_base
from incremental_train.reading import json_values
from incremental_train.toy import toy_tokenizer
from incremental_train.trace import TraceRefused, parse_trace

WORDS = 'where is my parcel it should have come on Monday I was charged twice for the order please send money back the app closes when I log in'.split()


def row(chance):
    "A conversation with a system turn, about 600 bytes as JSON"
    say = lambda n: ' '.join(chance.choices(WORDS, k=n))
    return {'messages': [{'role': 'system', 'content': 'You route support tickets.'}, {'role': 'user', 'content': say(50)}, {'role': 'assistant', 'content': say(38)}]}


def timed(call):
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def refusal(data):
    "The lines that are refused"
    try: parse_trace(data)
    except TraceRefused as e: return [n for n, _ in e.faults]


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rows', type=int, default=100_000)
    parser.add_argument('--lengths', type=int, default=20_000, help='rows that are tokenised')
    parser.add_argument('--model', help='MODEL_ID; unset: the toy tokenizer')
    parser.add_argument('--rounds', type=int, default=3, help='the best of so many is reported')
    args = parser.parse_args()
    chance = random.Random(7)
    lines = [json.dumps(row(chance)) for _ in range(args.rows)]
    data = '\n'.join(lines).encode()
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    mb, before = len(data) / 1e6, peak()
    json_s = min(timed(lambda: sum(1 for _ in json_values(data.decode())))[1] for _ in range(args.rounds))
    trace, parse_s = timed(lambda: parse_trace(data))
    parsed = peak()
    for _ in range(args.rounds - 1):
        del trace
        trace, again = timed(lambda: parse_trace(data))
        parse_s = min(parse_s, again)
    bad = args.rows * 2 // 3
    lines[bad - 1] = lines[bad - 1].replace('"assistant"', '"bot"')
    found, bad_s = timed(lambda: refusal('\n'.join(lines).encode()))
    assert found == [bad]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ChatTokenizer(find_base(args.model, weights=False).folder if args.model else toy_tokenizer(folder))
        some = trace.rows[:args.lengths]
        tokens, encode_s = min((timed(lambda: sum(len(encode(r, tokenizer, 1024).ids) for r in some)) for _ in range(args.rounds)), key=lambda result: result[1])
    print(json.dumps({'model': args.model or 'toy', 'rows': args.rows, 'mb': round(mb, 1), 'json_mb_s': round(mb / json_s, 1), 'parse_mb_s': round(mb / parse_s, 1), 'bad_row_line': found[0], 'bad_row_s': round(bad_s, 2),
                      'lengths_mb_s': round(mb * len(some) / args.rows / encode_s, 2), 'tokens': tokens, 'peak_mb_above_input': round(parsed - before), 'bytes_per_row_above_its_own': round((parsed - before) * 1024 ** 2 / args.rows - len(data) / args.rows)}))
