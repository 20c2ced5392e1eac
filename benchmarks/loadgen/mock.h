/* The mock: model servers that answer chat completions at once. */
#ifndef MOCK_H
#define MOCK_H

#include "wire.h"

void mock_prepare(void);
void mock_listen(int port);
void mock_accept(struct connection *listener);
void mock_event(struct connection *connection, uint32_t events);

/* Streams in lockstep, by the client they go to. */

/* Client `client` has read `n_seen` chunks of its stream: sends the next one. */
void lockstep_advance(int client, int n_seen);
/* Sends the next chunk of each stream that stands still since `since_ns`; returns how many did. */
int lockstep_push(int64_t since_ns);
/* Streams that the last run left behind are nobody's. */
void lockstep_forget(void);

#endif
