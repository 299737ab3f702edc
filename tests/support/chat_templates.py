"""Chat templates in the styles of well-known families, written for the tests."""

# ChatML: any role, text alone; tools, calls and their like are unknown to it.
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message['content'] + '<|im_end|>' }}
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

# Llama 3: a system message and tools first, one call for each message, results under a role of their own.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- for tool in tools or [] %}
    {{- '\\n\\n' + (tool | tojson(indent=4)) }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

# Mistral: tools go into the last message of the user, the system message only if that ends the conversation.
MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for message in talk %}
    {%- if message.role == 'user' %}
        {%- if tools and message == (talk | selectattr('role', 'equalto', 'user') | list | last) %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content ~ ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""

# Gemma: no system role, no tools, turns in alternation.
GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# DeepSeek-R1's distilled models: arguments are joined as text, and calls are shown where the content is null.
R1_DISTILL = """\
{%- set ns = namespace(tool=false, first=true, system='') -%}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.tool = false %}
        {{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is none %}
        {%- set ns.tool = false %}
        {%- for call in message.tool_calls %}
            {{- ('<|Assistant|><|calls|>' if loop.first else '\\n') + '<|call|>' + call.type + '<|sep|>' }}
            {{- call.function.name + '\\n' + '```json' + '\\n' + call.function.arguments + '\\n' + '```<|/call|>' }}
        {%- endfor %}
        {{- '<|/calls|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set words = message.content.split('</think>')[-1] %}
        {{- ('<|/outputs|>' if ns.tool else '<|Assistant|>') + words + eos_token }}
        {%- set ns.tool = false %}
    {%- elif message.role == 'tool' %}
        {{- ('' if ns.tool else '<|outputs|>') + '<|output|>' + message.content + '<|/output|>' }}
        {%- set ns.tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{ '<|/outputs|>' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}
"""

# Qwen 3: reasoning of the last turns, and a switch that closes it at once.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Hermes: a second template for tools, which leaves out what is said beside a call.
HERMES_TOOL_USE = """\
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ tool.function | tojson }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# As models that also see images have it: content is a list of parts, of the user and of the assistant.
PARTS = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# Text or parts, but a system message of text alone.
EITHER = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string or message.role == 'system' %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{ ' ' + part.text }}{% endfor %}
    {%- endif %}
{%- endfor %}
"""

# Content and calls joined without a look at what is missing.
JOINED = """\
{%- for tool in tools or [] %}{{ '<tool>' + tool.function.name }}{% endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' + call.function.name + (call.function.arguments | tojson) }}
    {%- endfor %}
{%- endfor %}
"""
