"A Space that keeps a small model learning: hand in a trace, train it while a GPU is lent, see what was trained"
import os
from functools import cache

os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false') # calls under the GPU fork this process

from incremental_train.config import Refused
from incremental_train.session import Session # brings in `spaces`, which wants to be there before torch is used


@cache
def session() -> Session: return Session() # settings are the Space's variables and secrets


def answered(action) -> str: # Markdown
    "What an action gives, or why it was refused"
    try: return action()
    except Refused as e: return f'**Refused**: {e}'


def hand_in(path, method) -> str:
    "Check a trace and queue it"
    def action():
        if not path: raise Refused('choose a file first: JSON or JSONL')
        reply = session().submit(path, method)
        return '\n\n'.join([f"{reply['id']} is queued at place {reply['position']}: {reply['rows']} rows, {reply['steps']} steps", *reply['notices']])
    return answered(action)


def train(seconds) -> str:
    "Train what waits, for as long as the quota may be used; what is left waits for the next time"
    return answered(lambda: session().drain(float(seconds))._repr_markdown_())


def history() -> str:
    "Every job that was trained"
    return answered(lambda: session().history()._repr_markdown_())


def main():
    import gradio as gr
    with gr.Blocks(title='incremental_train') as page:
        gr.Markdown('# Keep a small model learning\n\nA trace is JSON or JSONL, one example a row; each row is trained once.')
        with gr.Row():
            trace = gr.File(label='trace', file_types=['.json', '.jsonl'], type='filepath')
            method = gr.Dropdown(['sft', 'dpo', 'kto'], value='sft', label='method')
            seconds = gr.Number(60, minimum=10, label='seconds of GPU, at most')
        with gr.Row():
            submit, drain, look = gr.Button('Hand in'), gr.Button('Train', variant='primary'), gr.Button('History')
        answer = gr.Markdown()
        submit.click(hand_in, [trace, method], answer)
        drain.click(train, seconds, answer)
        look.click(history, None, answer)
    page.launch()


if __name__ == '__main__': main()
