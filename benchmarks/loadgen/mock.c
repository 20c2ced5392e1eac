#define _GNU_SOURCE
#include "mock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_REQUEST_BYTES (8 << 20)
/* Thousands of connections wait for a request: no more room than most need. It doubles as a body comes in. */
#define MIN_READ_BYTES (16 << 10)

struct mock {
    struct connection connection;
    struct buffer in;
    struct timer timer;
    bool streaming;
    int n_chunks;
    int n_sent;
    int64_t interval_us; /* -1: lockstep */
    int client;          /* of a lockstep stream, else -1 */
    int64_t sent_ns;     /* when its last chunk was sent */
};

/* The streams in lockstep, by client. */
static struct mock *lockstep[MAX_CLIENTS];

static char unary_answer[2048];
static size_t unary_answer_length;

static const char stream_head[] = "HTTP/1.1 200 OK\r\n"
                                  "date: Sun, 29 Nov 2026 13:00:00 GMT\r\n"
                                  "server: uvicorn\r\n"
                                  "content-type: text/event-stream; charset=utf-8\r\n"
                                  "transfer-encoding: chunked\r\n"
                                  "\r\n";
static const char stream_end[] = "e\r\n"
                                 "data: [DONE]\n\n"
                                 "\r\n"
                                 "0\r\n"
                                 "\r\n";

/* Every chunk carries the time of its sending, in ns of the monotonic clock. */
#define TIMESTAMP_DIGITS 19
static char stream_chunk[512];
static size_t stream_chunk_length;
static char *stream_chunk_timestamp;

void mock_prepare(void) {
    static const char unary_body[] =
        "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\","
        "\"created\":1764420000,\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"message\":"
        "{\"role\":\"assistant\",\"content\":\"A reverse proxy accepts the request of a client, chooses a "
        "replica that is likely to hold the prefix of the prompt in its KV cache, forwards the request to "
        "it, and returns the response of the replica to the client, chunk by chunk.\",\"refusal\":null,"
        "\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],"
        "\"usage\":{\"prompt_tokens\":1024,\"total_tokens\":1072,\"completion_tokens\":48,"
        "\"prompt_tokens_details\":null},\"prompt_logprobs\":null}";
    unary_answer_length = (size_t)snprintf(unary_answer, sizeof unary_answer,
                                           "HTTP/1.1 200 OK\r\n"
                                           "date: Sun, 29 Nov 2026 13:00:00 GMT\r\n"
                                           "server: uvicorn\r\n"
                                           "content-length: %zu\r\n"
                                           "content-type: application/json\r\n"
                                           "\r\n"
                                           "%s",
                                           strlen(unary_body), unary_body);

    static const char event[] =
        "data: {\"id\":\"chatcmpl-0123456789abc\",\"object\":\"chat.completion.chunk\","
        "\"created\":1764420000,\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"delta\":"
        "{\"content\":\"t=0000000000000000000\"},\"finish_reason\":null}]}\n\n";
    stream_chunk_length =
        (size_t)snprintf(stream_chunk, sizeof stream_chunk, "%zx\r\n%s\r\n", strlen(event), event);
    stream_chunk_timestamp = strstr(stream_chunk, "\"t=") + strlen("\"t=");
}

static void mock_close(struct mock *mock) {
    timer_disarm(&mock->timer);
    if (mock->client >= 0 && lockstep[mock->client] == mock)
        lockstep[mock->client] = NULL;
    close(mock->connection.fd);
    free(mock->connection.out.data);
    free(mock->in.data);
    free(mock);
}

static void mock_send_chunk(struct mock *mock) {
    int64_t now = now_ns();
    int64_t rest = now;
    for (int digit = TIMESTAMP_DIGITS - 1; digit >= 0; digit--) {
        stream_chunk_timestamp[digit] = (char)('0' + rest % 10);
        rest /= 10;
    }
    write_bytes(&mock->connection, stream_chunk, stream_chunk_length);
    mock->sent_ns = now;
    mock->n_sent++;
    if (mock->n_sent < mock->n_chunks)
        return;
    write_bytes(&mock->connection, stream_end, strlen(stream_end));
    mock->streaming = false;
    if (mock->client >= 0 && lockstep[mock->client] == mock)
        lockstep[mock->client] = NULL;
    mock->client = -1;
}

/* The next chunk of a paced stream. When the socket is full, EPOLLOUT arms the timer again. */
static void mock_timer_fired(void *owner) {
    struct mock *mock = owner;
    int64_t due_ns = mock->timer.due_ns;
    mock_send_chunk(mock);
    if (mock->streaming && buffer_length(&mock->connection.out) == 0)
        timer_arm(&mock->timer, due_ns + mock->interval_us * NS_PER_US);
}

static void mock_start_stream(struct mock *mock, const char *body, size_t n) {
    const char *chunks = field_value(body, n, "\"max_tokens\"");
    const char *seed = field_value(body, n, "\"seed\"");
    int code = seed != NULL ? atoi(seed) - SEED_BASE : SEED_CLIENTS;
    int client = code % SEED_CLIENTS;
    mock->streaming = true;
    mock->n_sent = 0;
    mock->n_chunks = chunks != NULL && atoi(chunks) > 0 ? atoi(chunks) : 1;
    if (code >= 0 && code < MAX_CLIENTS) {
        mock->interval_us = -1;
        mock->client = client;
        lockstep[client] = mock;
    } else {
        mock->interval_us = code >= SEED_CLIENTS ? (code / SEED_CLIENTS - 1) * SEED_INTERVAL_US : 0;
    }
    write_bytes(&mock->connection, stream_head, strlen(stream_head));
    mock_send_chunk(mock);
    if (mock->streaming && mock->interval_us >= 0)
        timer_arm(&mock->timer, now_ns() + mock->interval_us * NS_PER_US);
}

static void mock_answer_json(struct mock *mock, const char *status, const char *body) {
    char answer[1024];
    int n = snprintf(answer, sizeof answer,
                     "HTTP/1.1 %s\r\n"
                     "content-length: %zu\r\n"
                     "content-type: application/json\r\n"
                     "\r\n"
                     "%s",
                     status, strlen(body), body);
    write_bytes(&mock->connection, answer, (size_t)n);
}

static void mock_answer(struct mock *mock, const char *head, const char *body, size_t n) {
    if (starts_with(head, "POST /v1/chat/completions ")) {
        const char *stream = field_value(body, n, "\"stream\"");
        if (stream != NULL && starts_with(stream, "true"))
            mock_start_stream(mock, body, n);
        else
            write_bytes(&mock->connection, unary_answer, unary_answer_length);
    } else if (starts_with(head, "GET /v1/models ")) {
        mock_answer_json(mock, "200 OK",
                         "{\"object\":\"list\",\"data\":[{\"id\":\"mock-model\",\"object\":\"model\","
                         "\"created\":1764420000,\"owned_by\":\"vllm\",\"root\":\"mock-model\","
                         "\"parent\":null,\"max_model_len\":131072}]}");
    } else if (starts_with(head, "GET /health ")) {
        mock_answer_json(mock, "200 OK", "");
    } else {
        mock_answer_json(mock, "404 Not Found", "{\"detail\":\"Not Found\"}");
    }
}

/* Joins the chunks of a chunked body in place when it is whole. Returns its length on the wire, 0 while it
 * is not whole. Without trailers: a proxy sends none. */
static size_t join_chunks(char *wire, size_t n_wire, size_t *n_body) {
    for (int pass = 0; pass < 2; pass++) { /* 0: is it whole? 1: join */
        size_t at = 0;
        *n_body = 0;
        for (;;) {
            char *line_end = memmem(wire + at, n_wire - at, "\r\n", 2);
            if (line_end == NULL)
                return 0;
            size_t size = strtoul(wire + at, NULL, 16);
            size_t data = (size_t)(line_end - wire) + 2;
            if (size > MAX_REQUEST_BYTES || data + size + 2 > n_wire)
                return 0;
            if (pass == 1)
                memmove(wire + *n_body, wire + data, size);
            *n_body += size;
            at = data + size + 2;
            if (size == 0)
                break;
        }
        if (pass == 1)
            return at;
    }
    return 0;
}

/* Answers one whole request. False when none is there yet. */
static bool mock_take_request(struct mock *mock) {
    char *data = mock->in.data + mock->in.start;
    size_t n = buffer_length(&mock->in);
    size_t n_head = head_length(data, n);
    if (n_head == 0)
        return false;
    const char *length = header_value(data, n_head, "content-length:");
    char *body = data + n_head;
    size_t n_body = length != NULL ? strtoul(length, NULL, 10) : 0;
    size_t n_wire = n_body;
    if (length == NULL && header_value(data, n_head, "transfer-encoding:") != NULL) {
        n_wire = join_chunks(body, n - n_head, &n_body);
        if (n_wire == 0)
            return false;
    }
    if (n - n_head < n_wire)
        return false;
    mock_answer(mock, data, body, n_body);
    buffer_consume(&mock->in, n_head + n_wire);
    return true;
}

static void mock_read(struct mock *mock) {
    for (;;) {
        buffer_reserve(&mock->in, MIN_READ_BYTES + 1);
        size_t room = mock->in.capacity - mock->in.end - 1;
        ssize_t got = recv(mock->connection.fd, mock->in.data + mock->in.end, room, 0);
        if (got < 0 && errno == EAGAIN)
            break;
        if (got <= 0 || buffer_length(&mock->in) > MAX_REQUEST_BYTES) {
            mock_close(mock);
            return;
        }
        mock->in.end += (size_t)got;
        if ((size_t)got < room)
            break;
    }
    mock->in.data[mock->in.end] = '\0'; /* ends the number parsing of a body's last field */
    /* No proxy pipelines towards its upstream, so nothing waits here while a stream is sent. */
    while (!mock->streaming && buffer_length(&mock->in) > 0 && mock_take_request(mock))
        continue;
}

void mock_event(struct connection *connection, uint32_t events) {
    struct mock *mock = (struct mock *)connection;
    if ((events & EPOLLOUT) != 0) {
        bool flushed = flush(connection);
        if (flushed && mock->streaming && mock->interval_us >= 0 && !mock->timer.armed)
            timer_arm(&mock->timer, now_ns());
    }
    if ((events & ~(uint32_t)EPOLLOUT) != 0)
        mock_read(mock);
}

void mock_accept(struct connection *listener) {
    int fd;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct mock *mock = calloc(1, sizeof *mock);
        if (mock == NULL)
            die("calloc");
        set_no_delay(fd);
        mock->connection.kind = MOCK;
        mock->connection.fd = fd;
        mock->timer.fire = mock_timer_fired;
        mock->timer.owner = mock;
        mock->client = -1;
        watch(&mock->connection, EPOLL_CTL_ADD);
    }
}

void mock_listen(int port) {
    struct sockaddr_in address = loopback(port);
    struct connection *listener = calloc(1, sizeof *listener);
    int on = 1;
    if (listener == NULL)
        die("calloc");
    listener->kind = LISTENER;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener->fd, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(listener->fd, 4096) < 0) {
        fprintf(stderr, "port %d: %s\n", port, strerror(errno));
        exit(1);
    }
    watch(listener, EPOLL_CTL_ADD);
}

/* ---- measuring ------------------------------------------------------------------------------------- */

void lockstep_advance(int client, int n_seen) {
    struct mock *mock = lockstep[client];
    if (mock != NULL && mock->n_sent <= n_seen)
        mock_send_chunk(mock);
}

int lockstep_push(int64_t since_ns) {
    int n_pushed = 0;
    for (int client = 0; client < MAX_CLIENTS; client++) {
        if (lockstep[client] != NULL && lockstep[client]->sent_ns < since_ns) {
            mock_send_chunk(lockstep[client]);
            n_pushed++;
        }
    }
    return n_pushed;
}

void lockstep_forget(void) {
    memset(lockstep, 0, sizeof lockstep);
}
