/* Functions that note what arrives. Each recorder takes as many words as a
   caller of package dl can pass; a plan says which of them are addresses. */
#include <stdint.h>
#include <string.h>

typedef uintptr_t W;
enum { FUNCS = 250, ARGS = 32, CALLS = 8, BYTES = 256 };

struct arg { W kind, size, value; };
static struct plan { struct arg arg[ARGS]; W result; } plans[FUNCS];
static struct call { W fn; W word[ARGS]; unsigned char bytes[ARGS][BYTES]; } calls[CALLS];
static W ncalls;

int plan_arg(W fn, W i, W kind, W size, W value) {
	plans[fn].arg[i] = (struct arg){kind, size, value};
	return 0;
}
int plan_result(W fn, W result) { plans[fn].result = result; return 0; }

/* Copies the noted calls to out and forgets them. */
int take(struct call *out) {
	int n = (int)ncalls;
	memcpy(out, calls, sizeof calls);
	memset(calls, 0, sizeof calls);
	ncalls = 0;
	return n;
}

static void text(unsigned char *to, const char *from) {
	strncat((char *)to, from, BYTES - 1 - strlen((char *)to));
}

static W note(W fn, const W *word) {
	struct call *c = &calls[ncalls < CALLS ? ncalls++ : CALLS - 1];
	c->fn = fn;
	for (int i = 0; i < ARGS; i++) {
		struct arg a = plans[fn].arg[i];
		void *p = (void *)word[i];
		c->word[i] = word[i];
		if (!p) continue;
		switch (a.kind) {
		case 'o': case 'O':
			for (W k = 0; k < a.size; k++) ((unsigned char *)p)[k] = (unsigned char)(a.value >> 8 * (k % 8));
			break;
		case 'p': case 'S': case 'T':
			memcpy(c->bytes[i], p, a.size);
			break;
		case 's':
			text(c->bytes[i], p);
			break;
		case 'a': /* char *[], its length in the word before */
			for (W k = 0; k < word[i - 1]; k++) {
				if (k) text(c->bytes[i], "|");
				text(c->bytes[i], ((char **)p)[k]);
			}
			break;
		}
	}
	return plans[fn].result;
}

#define P4(a) W a##0, W a##1, W a##2, W a##3
#define V4(a) a##0, a##1, a##2, a##3
#define RECORDER(n) W record_##n(P4(a), P4(b), P4(c), P4(d), P4(e), P4(f), P4(g), P4(h)) { \
	const W w[ARGS] = {V4(a), V4(b), V4(c), V4(d), V4(e), V4(f), V4(g), V4(h)}; return note(n, w); }
/* Numbered 0 to 7, 10 to 17 and so on: one digit is pasted to another. */
#define EIGHT(t) RECORDER(t##0) RECORDER(t##1) RECORDER(t##2) RECORDER(t##3) \
	RECORDER(t##4) RECORDER(t##5) RECORDER(t##6) RECORDER(t##7)
EIGHT() EIGHT(1) EIGHT(2) EIGHT(3) EIGHT(4) EIGHT(5) EIGHT(6) EIGHT(7)
EIGHT(8) EIGHT(9) EIGHT(10) EIGHT(11) EIGHT(12) EIGHT(13) EIGHT(14) EIGHT(15)
EIGHT(16) EIGHT(17) EIGHT(18) EIGHT(19) EIGHT(20) EIGHT(21) EIGHT(22) EIGHT(23)

/* A 128-byte struct by value as the third argument: here the C compiler says
   where that lies. */
struct block { char bytes[128]; };
W record_98(W a, W b, struct block s, W d) {
	const W w[ARGS] = {a, b, (W)&s, d}; return note(98, w);
}
W record_99(W a, W b, struct block s, W d, W e) {
	const W w[ARGS] = {a, b, (W)&s, d, e}; return note(99, w);
}

/* A 64-byte struct by value as the second argument. */
struct half { char bytes[64]; };
W record_88(W a, struct half s) {
	const W w[ARGS] = {a, (W)&s}; return note(88, w);
}
W record_89(W a, struct half s, W c) {
	const W w[ARGS] = {a, (W)&s, c}; return note(89, w);
}
