"Rows for tests: ragged lengths, one to three turns"


def chat(*turns):
    "A row from alternating user and assistant texts"
    roles = ('user', 'assistant')
    return {'messages': [{'role': roles[i % 2], 'content': text} for i, text in enumerate(turns)]}


def tickets(n, start=0):
    "`n` different rows"
    return [chat(*['Where is it?', 'delivery, low'] * (i % 3 == 2), f'I was charged {"twice " * (i % 4)}for order {i}.', f'billing, order {i}' + ', high' * (i % 2)) for i in range(start, start + n)]
