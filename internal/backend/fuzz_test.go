package backend

import "testing"

// FuzzParseVisible reads lists of visible devices.
func FuzzParseVisible(f *testing.F) {
	f.Add("0,2,1")
	f.Add("GPU-1234,GPU-5678")
	f.Add("MIG-,-1,99999999999999999999")
	f.Fuzz(func(t *testing.T, s string) { parseVisible(s) })
}
