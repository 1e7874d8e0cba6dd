package ptxtest

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gochorus/chorus/internal/ptx"
)

var updateManifest = flag.Bool("ptx-sums", false, "write the digests of the PTX texts that the archives have")

// Manifest lists the texts of an archive, one in each line: the digest of the
// text, and the compiler input. Archives are compressed, so a review cannot see
// changes in them; the manifest shows which kernels have new PTX.
func Manifest(entries []ptx.Entry) string {
	var lines []string
	for _, e := range entries {
		lines = append(lines, fmt.Sprintf("%x %s compute_%d PTX-%s %s\n", sha256.Sum256(e.Text), e.Name, e.Arch, e.Version, e.Compiler))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// manifestOf returns the path of an archive's manifest.
func manifestOf(archive string) string {
	return filepath.Join("testdata", strings.TrimSuffix(archive, ".zst")+".sums")
}

// reviewed compares the texts with the manifest. It needs neither a compiler nor a GPU.
func reviewed(t *testing.T, archive string, entries []ptx.Entry) {
	file := manifestOf(archive)
	if *updateManifest {
		writeManifest(t, file, entries)
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range differences(string(want), Manifest(entries)) {
		t.Errorf("%s: %s: if make ptx generated the archive, commit its manifest, too; otherwise the archive was not reviewed", file, p)
	}
}

func writeManifest(t *testing.T, file string, entries []ptx.Entry) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(file), 0o755)
	if err == nil {
		err = os.WriteFile(file, []byte(Manifest(entries)), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// differences returns at most ten lines that only one of two manifests has.
func differences(want, have string) (out []string) {
	only := func(a, b, what string) {
		other := map[string]int{}
		for line := range strings.Lines(b) {
			other[line]++
		}
		for line := range strings.Lines(a) {
			if other[line]--; other[line] < 0 && len(out) < 10 {
				out = append(out, what+" "+strings.TrimSpace(line))
			}
		}
	}
	only(want, have, "the archive lacks")
	only(have, want, "the manifest lacks")
	return out
}
