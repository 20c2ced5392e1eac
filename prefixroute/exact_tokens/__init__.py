"""Exact tokens: prompts as the engine's own token ids, by its tokenizer and chat template (extra `tokenizers`).

Rendering and encoding happen in a process of their own (`worker`, started by `process`, kept by `service`):

- Templates are Python under the interpreter lock, and so is making a list of token ids. In a thread they would hold
  up the event loop by the interpreter's switch interval, 5 ms, again and again. The loop only writes and reads sockets.
- A template that loops, a pattern that backtracks without end, a panic or an allocation of a terabyte end the
  process, whatever holds them up; it is started again, and requests meanwhile are routed by bytes.

`load` reads files, `conversation` makes of a request what the engine gives its template, `template` renders, `encode`
turns text into ids with a `cache`, `equality` and `sample` prove one tokenizer library against the other, `exact` puts
these together; `verify` compares the result with what an instance says. Whatever fails, a request goes on by bytes.
"""
