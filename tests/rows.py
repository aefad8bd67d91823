"Rows for tests: ragged lengths, one to three turns, all three methods"


def chat(*turns):
    "A row from alternating user and assistant texts"
    roles = ('user', 'assistant')
    return {'messages': [{'role': roles[i % 2], 'content': text} for i, text in enumerate(turns)]}


def tickets(n, start=0):
    "`n` different SFT rows"
    return [chat(*['Where is it?', 'delivery, low'] * (i % 3 == 2), f'I was charged {"twice " * (i % 4)}for order {i}.', f'billing, order {i}' + ', high' * (i % 2)) for i in range(start, start + n)]


def pairs(n, start=0):
    "`n` different DPO rows"
    return [{'prompt': f'Where is parcel {i}?' + ' It is late.' * (i % 3), 'chosen': f'delivery, parcel {i}' + ', low' * (i % 2), 'rejected': 'I cannot say. ' * (1 + i % 4)} for i in range(start, start + n)]


def thumbs(n, start=0):
    "`n` different KTO rows"
    return [{'prompt': f'Where is parcel {i}?' + ' Hurry.' * (i % 4), 'completion': f'delivery, parcel {i}' if i % 2 else 'Who knows. ' * (1 + i % 3), 'desirable': bool(i % 2)} for i in range(start, start + n)]


MAKE = {'sft': tickets, 'dpo': pairs, 'kto': thumbs}
