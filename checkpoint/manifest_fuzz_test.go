package checkpoint

import (
	"encoding/json"
	"runtime/metrics"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzManifest seals any text with its digest, because a hostile author would, too. No text
// panics, memory is proportional to the text, and the parts of an accepted tensor cover it.
func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"version":1,"id":"x","step":7,"ranks":2,"values":[null,{"a":1}],"files":[{"name":"a.safetensors","bytes":9,"sha256":""}],` +
		`"tensors":[{"name":"t","dtype":"F32","shape":[2,3],"rows":2,"width":3,"parts":[{"file":0,"key":"t@0","start":0,"len":1},{"file":0,"key":"t@1","start":1,"len":2}]}]}`))
	f.Add([]byte(`{"version":1,"ranks":1,"files":[{"name":"../a"}]}`))
	f.Add([]byte(`{"version":1,"ranks":1,"files":[{"name":"a"}],"tensors":[{"dtype":"F32","shape":[9223372036854775807,2],"rows":1,"width":1,"parts":[{"len":1}]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		sealedText, err := json.Marshal(sealed{digest(text), text})
		if err != nil {
			return // it is not JSON
		}
		before := allocated()
		m, err := decodeManifest(sealedText)
		require.Less(t, allocated()-before, uint64(16<<20+1000*len(text)))
		if err != nil {
			return
		}
		for _, x := range m.Tensors {
			n := 0
			for _, p := range x.Parts {
				require.Less(t, p.File, len(m.Files))
				n += p.Len
			}
			require.Equal(t, x.Width, n)
		}
	})
}

// allocated returns how many bytes the process has allocated so far.
func allocated() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
