package dltest

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// The checks must fail where a table and a header differ, so each is run on a
// header of the test's own, in a process of its own where it is to fail.
const header = `
#include "deeper.h"
#define FAKE_FLAG 0x02
typedef enum { FAKE_OK = 0, FAKE_ERROR_LOST = 7, FAKE_ERROR_AGAIN = 0x10 } fakeResult;
struct fake { deeper a; char b; };
struct block { char b[128]; };
struct pair { int a, b; };
#ifdef __cplusplus
extern "C" {
#endif
#define fakeAlloc fakeAlloc_v2
fakeResult fakeAlloc(void **out, size_t n);
fakeResult fakeInit(int *comm, struct block id, unsigned char b, const char *name);
const char *fakeText(fakeResult r);
struct pair fakePair(void);
void fakeClose(void *comm);
#ifdef __cplusplus
}
#endif
`

func fakeHeader(t *testing.T) *Header {
	home := t.TempDir()
	if err := os.Mkdir(filepath.Join(home, "include"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"fake.h": header, "deeper.h": "#include <stddef.h>\ntypedef long long deeper;\n"} {
		if err := os.WriteFile(filepath.Join(home, "include", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("CUDA_HOME", home)
	return FindHeader(t, "fake.h", "deeper.h")
}

func TestHeaderAgrees(t *testing.T) {
	h := fakeHeader(t)
	h.RequireResults(`FAKE_(?:OK|ERROR_[A-Z]+)`, map[string]int64{"FAKE_OK": 0, "FAKE_ERROR_LOST": 7, "FAKE_ERROR_AGAIN": 16, "FAKE_ERROR_NEWER": 17})
	h.RequireValues(map[string]int64{"FAKE_FLAG": 2, "sizeof(struct fake)": 16, "offsetof(struct fake, b)": 8})
	h.RequirePrototypes(Signatures{"fakeAlloc_v2": "o8 w", "fakeInit": "o4 S b s", "fakeText": "*i", "fakeNewer": "w", "fakePair": "#", "fakeClose": "-w"})
	if names := h.Names(`FAKE_(\w+) =`); !slices.Equal(names, []string{"OK", "ERROR_LOST", "ERROR_AGAIN"}) {
		t.Error(names)
	}
	if !h.Mentions("fakeText") || h.Mentions("fakeTex") {
		t.Error("Mentions means whole words")
	}
}

func TestHeaderDiffers(t *testing.T) {
	checks := map[string]func(h *Header){
		"result missing":  func(h *Header) { h.RequireResults(`FAKE_ERROR_[A-Z]+`, map[string]int64{"FAKE_ERROR_LOST": 7}) },
		"result value":    func(h *Header) { h.RequireResults(`FAKE_ERROR_LOST`, map[string]int64{"FAKE_ERROR_LOST": 8}) },
		"no such results": func(h *Header) { h.RequireResults(`NONE_[A-Z]+`, nil) },
		"constant":        func(h *Header) { h.RequireValues(map[string]int64{"FAKE_FLAG": 3}) },
		"offset":          func(h *Header) { h.RequireValues(map[string]int64{"offsetof(struct fake, b)": 4}) },
		"arity":           func(h *Header) { h.RequirePrototypes(Signatures{"fakeAlloc_v2": "o8 w w"}) },
		"order":           func(h *Header) { h.RequirePrototypes(Signatures{"fakeAlloc_v2": "w o8"}) },
		"out width":       func(h *Header) { h.RequirePrototypes(Signatures{"fakeAlloc_v2": "o4 w"}) },
		"word width":      func(h *Header) { h.RequirePrototypes(Signatures{"fakeInit": "o4 S w s"}) },
		"result type":     func(h *Header) { h.RequirePrototypes(Signatures{"fakeText": "i"}) },
		"pair":            func(h *Header) { h.RequirePrototypes(Signatures{"fakePair": ""}) },
		"no result":       func(h *Header) { h.RequirePrototypes(Signatures{"fakeClose": "w"}) },
		"a result":        func(h *Header) { h.RequirePrototypes(Signatures{"fakePair": "-"}) },
		"nothing":         func(h *Header) { h.RequirePrototypes(Signatures{"fakeNewer": "i"}) },
	}
	if name := os.Getenv("CHORUS_TEST_DIFFERS"); name != "" {
		checks[name](fakeHeader(t))
		return
	}
	compiler(t, "c++", "g++", "clang++")
	for name := range checks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run=^TestHeaderDiffers$")
			cmd.Env = append(os.Environ(), "CHORUS_TEST_DIFFERS="+name)
			if out, err := cmd.CombinedOutput(); err == nil {
				t.Errorf("the check did not notice:\n%s", out)
			}
		})
	}
}
