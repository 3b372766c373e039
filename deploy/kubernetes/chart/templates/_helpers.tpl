{{- define "kvtide.labels" -}}
app.kubernetes.io/name: kvtide
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "kvtide.node" -}}
app.kubernetes.io/name: kvtide
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- end }}

{{- define "kvtide.directory" -}}
app.kubernetes.io/name: kvtide
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: directory
{{- end }}

{{- define "kvtide.vllm" -}}
app.kubernetes.io/name: kvtide
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: vllm
{{- end }}
