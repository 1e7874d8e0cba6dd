package differ

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
)

// A regression is a program that once differed.
type regression struct {
	Why     string   `json:"why"`
	Program *Program `json:"program"`
}

// Programs that once differed do so no more.
func TestRegressions(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "regressions.json"))
	require.NoError(t, err)
	var list []regression
	require.NoError(t, json.Unmarshal(text, &list))
	replay := func(t *testing.T, cuda bool) {
		for _, x := range list {
			w, err := newWorker(cuda) // numbers of streams and addresses of memory as in a new process
			require.NoError(t, err)
			_, _, ok := predict(x.Program)
			require.True(t, ok, "%s: the program has a race", x.Why)
			for range 5 { // the order of streams differs from run to run
				if d := w.check(x.Program, nil); d != nil {
					t.Errorf("%s: %v\n%v", x.Why, d, x.Program)
					break
				}
			}
			w.close()
		}
	}
	t.Run("virtual", func(t *testing.T) { replay(t, false) })
	t.Run("cuda", func(t *testing.T) {
		testgpu.CUDA(t, 1)
		replay(t, true)
	})
}

// A program survives being written and read, and its seed makes it again.
func TestProgramsAreData(t *testing.T) {
	for i := range 200 {
		p := generate(7, i)
		text, err := json.Marshal(p)
		require.NoError(t, err)
		q := new(Program)
		require.NoError(t, json.Unmarshal(text, q))
		require.Equal(t, p.String(), q.String())
		require.Equal(t, p.String(), generate(7, i).String())
		_, _, ok := predict(q)
		require.True(t, ok, "program %d has a race", i)
	}
}

// What a failing program is printed as compiles, whichever operations it has.
func TestPrintedProgramsCompile(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("no go command here: ", err)
	}
	if _, err := os.Stat("print_test.go"); err != nil {
		t.Skip("no source here: ", err)
	}
	all := &Program{}
	seen := map[string]bool{}
	for i := 0; len(seen) < len(kinds) && i < 1000; i++ {
		p, fresh := generate(3, i), false
		each(p.Ops, func(op *Op) { fresh, seen[op.K] = fresh || !seen[op.K], true })
		if fresh {
			shift(p.Ops, 1000*i)
			all.Ops = append(all.Ops, p.Ops...)
		}
	}
	for name, k := range kinds {
		require.True(t, seen[name] || k.weight == 0, "no program has %q", name)
	}
	all.number()
	code, err := goCode(all)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, []byte(code), 0o600))
	args := []string{"vet", file}
	if testhost.On { // the packages are compiled already
		args = []string{"vet", "-race", file}
	}
	out, err := exec.Command("go", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// shift gives the objects of a program other numbers.
func shift(ops []Op, by int) {
	move := func(list ...*int) {
		for _, n := range list {
			if *n > 0 {
				*n += by
			}
		}
	}
	each(ops, func(op *Op) {
		move(&op.R, &op.S, &op.O, &op.X.O, &op.Y.O)
		if op.K == "event elapsed" || op.K == "update" {
			move(&op.N)
		}
		for i := range op.V {
			move(&op.V[i])
		}
	})
}
