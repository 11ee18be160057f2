/* Reference server of the truth bench: answers completions on a schedule and writes down when.
 *
 * One thread, epoll, HTTP/1.1 with keep-alive, loopback only. A request that has been read whole at t is answered with
 * the response head at once and token k at t + ttft + k * itl: absolute deadlines, so that lateness never adds up. Text
 * and token id of the first token are the request's number, by which a client's record is paired with the log.
 *
 * Every time is CLOCK_MONOTONIC in nanoseconds. A request's arrival is the kernel's receive stamp of its first byte,
 * which this server's own queue can't delay; a chunk's time is taken right before its write(), which on loopback puts
 * the bytes into the client's socket before it returns.
 *
 * Prints its port, serves until standard input ends, then writes the log: one JSON object a line and request.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/errqueue.h>
#include <linux/net_tstamp.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 64
#define READ_STEP (16 << 10)
/* First reads are short: a stamp is that of the last segment read, and the first byte's is wanted. */
#define FIRST_READ 256
/* Where the keys beside the prompt are looked for: from both ends of a body, so that long prompts cost nothing. */
#define EDGE 1024
/* Chunks that an endless stream keeps the times of. */
#define ENDLESS_LOG 4096

enum fault {
    NONE,
    EMPTY_FIRST, /* an empty (chat: role-only) chunk at half the TTFT */
    NO_TEXT,     /* every chunk without text and ids */
    SEVERAL,     /* four tokens a chunk */
    STALL,       /* two seconds of silence in the middle */
    NO_DONE,     /* the stream ends without [DONE] */
    SHORT,       /* a clean end after half of the tokens */
    ERROR_200,   /* an error object after half of the tokens, status 200 */
    HTTP_500,
    HTTP_429,
    CRLF,     /* lines end with CR LF */
    COMMENTS, /* a comment before each event */
    USAGE,    /* usage in every chunk */
    CUT,      /* HTTP chunks that end anywhere inside an event */
    ENDLESS,  /* tokens without end */
    FAULTS
};
static const char *const FAULT_NAMES[FAULTS] = {"none",     "empty-first", "no-text",  "several", "stall",
                                                "no-done",  "short",       "error-200", "http-500", "http-429",
                                                "crlf",     "comments",    "usage",    "cut",     "endless"};
#define STALL_NS 2000000000LL
#define TOKENS_A_CHUNK 4

struct connection;

struct request {
    int64_t number, arrival, first_read, last_read, due, end;
    int64_t *write_at, *written_at;
    int chunks, chunks_room, tokens, sent;
    size_t bytes;
    bool chat, usage, usage_each, ids, announced;
    const char *state; /* open, complete, or closed by the client */
    char id[64];       /* X-Request-Id, empty without one */
    int connection_number;
    struct connection *connection;
};

struct connection {
    int fd, number;
    char *in;
    size_t in_used, in_room;
    int64_t arrival, first_read;
    size_t head_bytes, body_bytes; /* of the request being read; head_bytes 0 while its head isn't complete */
    struct request *request;       /* the one being answered */
    char *out;                     /* what the socket didn't take yet */
    size_t out_used, out_sent, out_room;
    bool dead;
};

struct timer {
    int64_t due;
    struct request *request;
};

static struct {
    int64_t ttft, itl, spin;
    enum fault fault;
    const char *log;
} option = {.ttft = 50000000, .itl = 10000000};

static int poller, listener;
static struct request **requests;
static size_t request_count, request_room;
static struct timer *timers;
static size_t timer_count, timer_room;
static struct connection **dead;
static size_t dead_count, dead_room;
static int connection_count;
static char *payload; /* the event being put together */
static size_t payload_used, payload_room;
static char *frame;
static size_t frame_used, frame_room;

static int64_t nanoseconds(struct timespec t) { return t.tv_sec * 1000000000LL + t.tv_nsec; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return nanoseconds(t);
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *grown(void *memory, size_t *room, size_t wanted, size_t item) {
    if (wanted <= *room)
        return memory;
    *room = wanted * 2;
    memory = realloc(memory, *room * item);
    if (memory == NULL)
        die("realloc");
    return memory;
}

/* --- timers: a binary heap --- */

static void timer_add(int64_t due, struct request *request) {
    timers = grown(timers, &timer_room, timer_count + 1, sizeof *timers);
    size_t place = timer_count++;
    while (place > 0 && timers[(place - 1) / 2].due > due) {
        timers[place] = timers[(place - 1) / 2];
        place = (place - 1) / 2;
    }
    timers[place] = (struct timer){due, request};
}

static struct request *timer_take(void) {
    struct request *first = timers[0].request;
    struct timer moved = timers[--timer_count];
    size_t place = 0;
    for (;;) {
        size_t child = 2 * place + 1;
        if (child >= timer_count)
            break;
        if (child + 1 < timer_count && timers[child + 1].due < timers[child].due)
            child++;
        if (timers[child].due >= moved.due)
            break;
        timers[place] = timers[child];
        place = child;
    }
    timers[place] = moved;
    return first;
}

/* --- connections --- */

static void watch(struct connection *c, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void connection_close(struct connection *c) {
    if (c->dead)
        return;
    c->dead = true;
    close(c->fd);
    if (c->request != NULL) {
        c->request->state = "closed";
        c->request->end = now_ns();
        c->request->connection = NULL;
        c->request = NULL;
    }
    /* Freed after this turn: events of the same turn may still name it. */
    dead = grown(dead, &dead_room, dead_count + 1, sizeof *dead);
    dead[dead_count++] = c;
}

static void bury(void) {
    while (dead_count > 0) {
        struct connection *c = dead[--dead_count];
        free(c->in);
        free(c->out);
        free(c);
    }
}

static void accept_all(void) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        int yes = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        struct connection *c = calloc(1, sizeof *c);
        if (c == NULL)
            die("calloc");
        c->fd = fd;
        c->number = connection_count++;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0)
            die("epoll_ctl");
    }
}

/* --- answers --- */

static void put(const char *text, size_t length) {
    payload = grown(payload, &payload_room, payload_used + length, 1);
    memcpy(payload + payload_used, text, length);
    payload_used += length;
}

static void __attribute__((format(printf, 1, 2))) putf(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    payload = grown(payload, &payload_room, payload_used + 1024, 1);
    payload_used += vsnprintf(payload + payload_used, 1024, format, arguments);
    va_end(arguments);
}

static void frame_add(const char *text, size_t length) {
    frame = grown(frame, &frame_room, frame_used + length, 1);
    memcpy(frame + frame_used, text, length);
    frame_used += length;
}

static void frame_chunk(const char *text, size_t length) {
    char head[32];
    frame_add(head, snprintf(head, sizeof head, "%zx\r\n", length));
    frame_add(text, length);
    frame_add("\r\n", 2);
}

/* Move the event into the frame as an HTTP chunk. */
static void event_done(void) {
    size_t at = 0;
    if (option.fault == CUT && payload_used > 2) {
        size_t cut = 1 + request_count % (payload_used - 2);
        frame_chunk(payload, cut);
        at = cut;
    }
    frame_chunk(payload + at, payload_used - at);
    payload_used = 0;
}

struct span {
    int64_t begin, end;
};

/* Send what the frame holds; returns when the write began and ended. What the socket doesn't take follows when it can. */
static struct span frame_send(struct connection *c) {
    struct span span;
    span.begin = now_ns();
    ssize_t sent = send(c->fd, frame, frame_used, MSG_NOSIGNAL);
    span.end = now_ns();
    if (sent < 0 && errno != EAGAIN) {
        connection_close(c);
    } else if ((size_t)(sent < 0 ? 0 : sent) < frame_used) {
        size_t left = frame_used - (sent < 0 ? 0 : sent);
        c->out = grown(c->out, &c->out_room, left, 1);
        memcpy(c->out, frame + frame_used - left, left);
        c->out_used = left;
        c->out_sent = 0;
        watch(c, EPOLLIN | EPOLLOUT);
    }
    frame_used = 0;
    return span;
}

static void put_usage(const struct request *r) {
    int tokens = option.fault == NO_TEXT ? 0 : r->sent; /* without text because there was no token */
    putf("{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":null}", 1,
         1 + tokens, tokens);
}

static const char *line_end(void) { return option.fault == CRLF ? "\r\n\r\n" : "\n\n"; }

/* One event with `count` tokens (0: an empty or role-only one). The first carries the request's number. */
static void put_event(struct request *r, int count, bool last) {
    if (option.fault == COMMENTS)
        put(": ping\n\n", 8);
    putf("data: {\"id\":\"%s-%lld\",\"object\":\"%s\",\"created\":0,\"model\":\"m\",\"choices\":[{\"index\":0,",
         r->chat ? "chatcmpl" : "cmpl", (long long)r->number, r->chat ? "chat.completion.chunk" : "text_completion");
    put(r->chat ? "\"delta\":{" : "", r->chat ? 9 : 0);
    if (r->chat && count == 0 && option.fault != NO_TEXT)
        putf("\"role\":\"assistant\",");
    putf("\"%s\":\"", r->chat ? "content" : "text");
    bool text = option.fault != NO_TEXT;
    for (int i = 0; text && i < count; i++) {
        if (r->sent + i == 0)
            putf("#%lld", (long long)r->number);
        else
            put(" w", 2);
    }
    putf("\"%s,\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null", r->chat ? "}" : "",
         last ? "\"length\"" : "null");
    if (r->ids && text) {
        putf(",\"token_ids\":[");
        for (int i = 0; i < count; i++)
            putf("%s%lld", i ? "," : "", r->sent + i == 0 ? (long long)r->number : 1LL);
        put("]", 1);
        if (r->sent == 0 && count > 0) {
            /* As vLLM does for return_token_ids: the prompt's ids come back, here as they were written. */
            struct connection *c = r->connection;
            const char *body = c->in + c->head_bytes;
            const char *from = memmem(body, c->body_bytes < EDGE ? c->body_bytes : EDGE, "\"prompt\":", 9);
            const char *to = from ? memchr(from, ']', body + c->body_bytes - from) : NULL;
            if (to != NULL) {
                putf(",\"prompt_token_ids\":");
                from = memchr(from, '[', to - from);
                put(from, to + 1 - from);
            }
        }
    }
    putf("}],\"usage\":");
    r->sent += count;
    if (r->usage && (option.fault == USAGE || r->usage_each))
        put_usage(r);
    else
        putf("null");
    putf("}%s", line_end());
    event_done();
}

static void note_write(struct request *r, struct span span) {
    if (r->chunks < r->chunks_room) {
        r->write_at[r->chunks] = span.begin;
        r->written_at[r->chunks++] = span.end;
    }
}

static void request_begin(struct connection *c);

/* An answer is over: what came in behind it, if anything, is the next request's. */
static void request_end(struct request *r) {
    struct connection *c = r->connection;
    r->state = "complete";
    r->connection = NULL;
    c->request = NULL;
    size_t used = c->head_bytes + c->body_bytes;
    memmove(c->in, c->in + used, c->in_used - used);
    c->in_used -= used;
    c->head_bytes = c->body_bytes = 0;
    if (c->in_used > 0)
        request_begin(c);
}

/* Send the frame as the last piece of an answer. */
static struct span answer_last(struct request *r) {
    frame_add("0\r\n\r\n", 5);
    struct span span = frame_send(r->connection);
    r->end = span.begin;
    if (r->connection != NULL)
        request_end(r);
    return span;
}

static void frame_head(int status, const char *reason, const char *type) {
    char head[256];
    frame_add(head, snprintf(head, sizeof head,
                             "HTTP/1.1 %d %s\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n", status, reason,
                             type));
}

static void answer_error(struct request *r, int status, const char *reason) {
    frame_head(status, reason, "application/json");
    putf("{\"error\":{\"message\":\"scripted failure\",\"type\":\"%s\",\"param\":null,\"code\":%d}}", reason, status);
    event_done();
    answer_last(r);
}

/* The next event of an answer is due. */
static void step(struct request *r) {
    struct connection *c = r->connection;
    if (c == NULL)
        return; /* the client left */
    if (c->out_used > c->out_sent) {
        timer_add(now_ns() + 50000, r); /* the socket is full: an event never overtakes another */
        return;
    }
    if (option.fault == HTTP_500) {
        answer_error(r, 500, "Internal Server Error");
        return;
    }
    if (option.fault == HTTP_429) {
        answer_error(r, 429, "Too Many Requests");
        return;
    }
    if (option.fault == EMPTY_FIRST && !r->announced) {
        r->announced = true;
        put_event(r, 0, false);
        frame_send(c);
        timer_add(r->due, r);
        return;
    }
    if (r->chat && r->sent == 0 && option.fault != EMPTY_FIRST)
        put_event(r, 0, false); /* as vLLM: the role comes with the first token, in a chunk of its own */
    int half = r->tokens / 2;
    if (option.fault == ERROR_200 && r->sent >= half) {
        putf("data: {\"error\":{\"message\":\"scripted failure\",\"type\":\"InternalServerError\",\"code\":500}}%s",
             line_end());
        event_done();
        putf("data: [DONE]%s", line_end());
        event_done();
        answer_last(r);
        return;
    }
    int count = option.fault == SEVERAL ? TOKENS_A_CHUNK : 1;
    int all = option.fault == SHORT ? (half > 0 ? half : 1) : r->tokens;
    if (count > all - r->sent && option.fault != ENDLESS)
        count = all - r->sent;
    bool last = r->sent + count >= all && option.fault != ENDLESS;
    put_event(r, count, last && option.fault != SHORT);
    if (!last) {
        note_write(r, frame_send(c));
        int64_t due = r->due + (int64_t)(r->sent / (option.fault == SEVERAL ? TOKENS_A_CHUNK : 1)) * option.itl;
        if (option.fault == STALL && r->sent > half)
            due += STALL_NS;
        if (r->connection != NULL)
            timer_add(due, r);
        return;
    }
    if (r->usage) {
        putf("data: {\"id\":\"cmpl-%lld\",\"object\":\"%s\",\"created\":0,\"model\":\"m\",\"choices\":[],\"usage\":",
             (long long)r->number, r->chat ? "chat.completion.chunk" : "text_completion");
        put_usage(r);
        putf("}%s", line_end());
        event_done();
    }
    if (option.fault != NO_DONE) {
        putf("data: [DONE]%s", line_end());
        event_done();
    }
    note_write(r, answer_last(r));
}

/* --- requests --- */

static const char *header(const char *head, size_t length, const char *name) {
    size_t size = strlen(name);
    for (const char *line = memchr(head, '\n', length); line != NULL;) {
        line++;
        size_t left = head + length - line;
        if (left > size && strncasecmp(line, name, size) == 0 && line[size] == ':') {
            line += size + 1;
            while (*line == ' ')
                line++;
            return line;
        }
        line = memchr(line, '\n', left);
    }
    return NULL;
}

/* The value after a key of the body, searched from both ends. */
static const char *value(const char *body, size_t length, const char *key) {
    size_t edge = length < EDGE ? length : EDGE;
    const char *found = memmem(body, edge, key, strlen(key));
    if (found == NULL)
        found = memmem(body + length - edge, edge, key, strlen(key));
    if (found == NULL)
        return NULL;
    found += strlen(key);
    while (found < body + length && (*found == ' ' || *found == ':'))
        found++;
    return found < body + length ? found : NULL;
}

static bool is_true(const char *text) { return text != NULL && *text == 't'; }

static void answer_plain(struct connection *c, const char *body) {
    char head[1024];
    frame_add(head, snprintf(head, sizeof head,
                             "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                             strlen(body), body));
    frame_send(c);
    size_t used = c->head_bytes + c->body_bytes;
    memmove(c->in, c->in + used, c->in_used - used);
    c->in_used -= used;
    c->head_bytes = c->body_bytes = 0;
}

static void request_start(struct connection *c) {
    const char *body = c->in + c->head_bytes;
    struct request *r = calloc(1, sizeof *r);
    if (r == NULL)
        die("calloc");
    r->number = request_count;
    requests = grown(requests, &request_room, request_count + 1, sizeof *requests);
    requests[request_count++] = r;
    r->connection = c;
    r->connection_number = c->number;
    r->state = "open";
    r->arrival = c->arrival;
    r->first_read = c->first_read;
    r->last_read = now_ns();
    r->bytes = c->head_bytes + c->body_bytes;
    r->chat = memmem(c->in, c->head_bytes, "/chat/completions", 17) != NULL;
    const char *text = value(body, c->body_bytes, "\"max_tokens\"");
    if (text == NULL || !isdigit((unsigned char)*text))
        text = value(body, c->body_bytes, "\"max_completion_tokens\"");
    r->tokens = text != NULL && isdigit((unsigned char)*text) ? atoi(text) : 16;
    if (r->tokens < 1)
        r->tokens = 1;
    r->usage = is_true(value(body, c->body_bytes, "\"include_usage\""));
    r->usage_each = is_true(value(body, c->body_bytes, "\"continuous_usage_stats\""));
    r->ids = is_true(value(body, c->body_bytes, "\"return_token_ids\""));
    const char *id = header(c->in, c->head_bytes, "x-request-id");
    if (id != NULL)
        snprintf(r->id, sizeof r->id, "%.*s", (int)strcspn(id, "\r\n\"\\"), id);
    r->chunks_room = option.fault == ENDLESS ? ENDLESS_LOG : r->tokens;
    r->write_at = malloc(r->chunks_room * sizeof *r->write_at);
    r->written_at = malloc(r->chunks_room * sizeof *r->written_at);
    if (r->write_at == NULL || r->written_at == NULL)
        die("malloc");
    r->due = r->last_read + option.ttft;
    c->request = r;
    if (option.fault != HTTP_500 && option.fault != HTTP_429) {
        frame_head(200, "OK", "text/event-stream; charset=utf-8");
        if (option.ttft > 0)
            frame_send(c); /* without delay, head and first event share a write */
    }
    if (r->connection == NULL)
        return;
    if (option.ttft == 0)
        step(r);
    else
        timer_add(option.fault == EMPTY_FIRST ? r->last_read + option.ttft / 2 : r->due, r);
}

/* Look whether the bytes read so far hold a whole request, and start it. */
static void request_begin(struct connection *c) {
    while (c->request == NULL && !c->dead) {
        if (c->head_bytes == 0) {
            const char *end = memmem(c->in, c->in_used, "\r\n\r\n", 4);
            if (end == NULL)
                return;
            c->head_bytes = end + 4 - c->in;
            const char *length = header(c->in, c->head_bytes, "content-length");
            c->body_bytes = length != NULL ? strtoull(length, NULL, 10) : 0;
            c->in = grown(c->in, &c->in_room, c->head_bytes + c->body_bytes, 1);
        }
        if (c->in_used < c->head_bytes + c->body_bytes)
            return;
        if (strncmp(c->in, "POST ", 5) == 0)
            request_start(c);
        else if (memmem(c->in, c->head_bytes, "/v1/models", 10) != NULL)
            answer_plain(c, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":0,"
                            "\"owned_by\":\"kvladder\",\"root\":\"m\",\"max_model_len\":131072}]}");
        else
            answer_plain(c, "{}"); /* /health, /metrics: there is nothing to say */
        if (c->in_used == 0)
            return;
    }
}

/* The kernel stamps in CLOCK_REALTIME. The closest of a few looks counts: this process may be held up inside one. */
static int64_t monotonic_less_real(void) {
    int64_t width = INT64_MAX, difference = 0;
    for (int look = 0; look < 5 && width > 500; look++) {
        struct timespec real;
        int64_t before = now_ns();
        clock_gettime(CLOCK_REALTIME, &real);
        int64_t after = now_ns();
        if (after - before < width) {
            width = after - before;
            difference = before + width / 2 - nanoseconds(real);
        }
    }
    return difference;
}

static int64_t arrival_of(struct msghdr *message, int64_t read_at) {
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SO_TIMESTAMPING)
            continue;
        struct scm_timestamping stamps;
        memcpy(&stamps, CMSG_DATA(part), sizeof stamps);
        int64_t at = nanoseconds(stamps.ts[0]);
        if (at != 0)
            return at + monotonic_less_real();
    }
    return read_at;
}

static void read_all(struct connection *c) {
    while (!c->dead) {
        bool first = c->in_used == 0;
        size_t step_bytes = first ? FIRST_READ : READ_STEP;
        size_t wanted = c->head_bytes + c->body_bytes;
        if (!first && wanted > c->in_used)
            step_bytes = wanted - c->in_used;
        if (c->in_used + step_bytes > c->in_room)
            c->in = grown(c->in, &c->in_room, c->in_used + step_bytes, 1);
        char control[256];
        struct iovec part = {c->in + c->in_used, step_bytes};
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(c->fd, &message, 0);
        if (got < 0 && errno == EAGAIN)
            return;
        if (got <= 0) {
            connection_close(c);
            return;
        }
        if (first) {
            c->first_read = now_ns();
            c->arrival = arrival_of(&message, c->first_read);
        }
        c->in_used += got;
        if (c->request == NULL)
            request_begin(c);
        if ((size_t)got < step_bytes || c->request != NULL)
            return;
    }
}

static void write_rest(struct connection *c) {
    ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_used - c->out_sent, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN)
            connection_close(c);
        return;
    }
    c->out_sent += sent;
    if (c->out_sent == c->out_used) {
        c->out_used = c->out_sent = 0;
        watch(c, EPOLLIN);
    }
}

/* --- the loop --- */

static void run_due(void) {
    while (timer_count > 0 && timers[0].due <= now_ns())
        step(timer_take());
}

static void serve(void) {
    struct epoll_event events[EVENTS];
    for (;;) {
        run_due();
        bury();
        struct timespec timeout = {3600, 0};
        if (timer_count > 0) {
            int64_t left = timers[0].due - option.spin - now_ns();
            left = left < 0 ? 0 : left;
            timeout = (struct timespec){left / 1000000000, left % 1000000000};
        }
        int count = epoll_pwait2(poller, events, EVENTS, &timeout, NULL);
        for (int i = 0; i < count; i++) {
            struct connection *c = events[i].data.ptr;
            if (c == (void *)&poller)
                return; /* standard input ended */
            if (c == (void *)&listener) {
                accept_all();
                continue;
            }
            if (!c->dead && (events[i].events & EPOLLOUT))
                write_rest(c);
            if (!c->dead && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
                read_all(c);
            run_due(); /* a crowd of readers must not hold back what is due */
        }
    }
}

static void write_log(void) {
    FILE *file = fopen(option.log, "w");
    if (file == NULL)
        die(option.log);
    for (size_t i = 0; i < request_count; i++) {
        struct request *r = requests[i];
        fprintf(file,
                "{\"number\":%lld,\"connection\":%d,\"request_id\":\"%s\",\"bytes\":%zu,\"state\":\"%s\","
                "\"arrival_ns\":%lld,\"first_read_ns\":%lld,\"last_read_ns\":%lld,\"due_ns\":%lld,\"end_ns\":%lld,"
                "\"tokens\":%d,\"write_ns\":[",
                (long long)r->number, r->connection_number, r->id, r->bytes, r->state, (long long)r->arrival,
                (long long)r->first_read, (long long)r->last_read, (long long)r->due, (long long)r->end, r->sent);
        for (int k = 0; k < r->chunks; k++)
            fprintf(file, "%s%lld", k ? "," : "", (long long)r->write_at[k]);
        fprintf(file, "],\"written_ns\":[");
        for (int k = 0; k < r->chunks; k++)
            fprintf(file, "%s%lld", k ? "," : "", (long long)r->written_at[k]);
        fprintf(file, "]}\n");
    }
    if (fclose(file) != 0)
        die(option.log);
}

static int64_t microseconds(const char *name, const char *text) {
    char *end;
    double number = strtod(text, &end);
    if (*end != '\0' || number < 0) {
        fprintf(stderr, "--%s: a number of microseconds is wanted, not %s\n", name, text);
        exit(2);
    }
    return (int64_t)(number * 1000);
}

int main(int argc, char **argv) {
    static const struct option names[] = {{"ttft-us", 1, NULL, 't'}, {"itl-us", 1, NULL, 'i'},
                                          {"spin-us", 1, NULL, 's'}, {"fault", 1, NULL, 'f'},
                                          {"log", 1, NULL, 'l'},     {NULL, 0, NULL, 0}};
    int choice;
    while ((choice = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (choice) {
        case 't': option.ttft = microseconds("ttft-us", optarg); break;
        case 'i': option.itl = microseconds("itl-us", optarg); break;
        case 's': option.spin = microseconds("spin-us", optarg); break;
        case 'l': option.log = optarg; break;
        case 'f':
            for (option.fault = NONE; option.fault < FAULTS; option.fault++)
                if (strcmp(optarg, FAULT_NAMES[option.fault]) == 0)
                    break;
            if (option.fault < FAULTS)
                break;
            fprintf(stderr, "--fault: unknown: %s\n", optarg);
            return 2;
        default: return 2;
        }
    }
    if (option.log == NULL) {
        fprintf(stderr, "--log: a file is wanted\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    /* Accepted sockets inherit the stamps; set here, they are on before the first byte. */
    int stamps = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    if (setsockopt(listener, SOL_SOCKET, SO_TIMESTAMPING, &stamps, sizeof stamps) < 0)
        die("SO_TIMESTAMPING");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) < 0 || listen(listener, 4096) < 0 ||
        getsockname(listener, (struct sockaddr *)&address, &size) < 0)
        die("listen");
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listener};
    struct epoll_event input = {.events = EPOLLIN, .data.ptr = &poller};
    if (poller < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event) < 0 ||
        epoll_ctl(poller, EPOLL_CTL_ADD, STDIN_FILENO, &input) < 0)
        die("epoll");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    serve();
    write_log();
    return 0;
}
