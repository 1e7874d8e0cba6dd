package nvtx_test

// toolC is a profiler: it writes down what it is told. NVTX's own headers are
// not needed; the layouts are those that tools are compiled with.
const toolC = `
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef void (*fn)(void);
typedef const void *(*get_export_table)(uint32_t);
struct callbacks { size_t size; int (*get_module)(int module, fn ***table, unsigned *size); };
struct version { size_t size; uint32_t version, reserved; void (*set)(uint32_t); };

static char text[4096];
static void say(const char *what, const char *name, long n) {
	snprintf(text + strlen(text), sizeof text - strlen(text), "%s(%s)=%ld;", what, name ? name : "", n);
}
const char *events(void) { return text; }

static long ranges, depth;
static void mark(const char *name) { say("mark", name, 0); }
static uint64_t start(const char *name) { say("start", name, ++ranges); return 0x100000000ull + ranges; }
static void end(uint64_t id) { say("end", 0, (long)(id - 0x100000000ull)); }
static int push(const char *name) { say("push", name, depth); return (int)depth++; }
static int pop(void) { say("pop", 0, depth - 1); return (int)--depth; }

int InitializeInjectionNvtx2(get_export_table get) {
	const struct callbacks *c = get(1);
	const struct version *v = get(3);
	fn **table;
	unsigned size = 0;
	if (!c || c->size != sizeof *c || !v || v->size != sizeof *v || v->version != 3 || get(2) || get(9)) return 0;
	v->set(3);
	if (c->get_module(0, &table, &size) || c->get_module(7, &table, &size)) return 0;
	for (int m = 1; m < 7; m++) {
		if (!c->get_module(m, &table, &size) || table[0] || table[size] || !table[size - 1]) return 0;
		if (!c->get_module(m, 0, 0)) return 0;
	}
	if (!c->get_module(1, &table, &size) || size != 16) return 0;
	*table[2] = (fn)mark;
	*table[5] = (fn)start;
	*table[7] = (fn)end;
	*table[9] = (fn)push;
	*table[11] = (fn)pop;
	return 1;
}
`
